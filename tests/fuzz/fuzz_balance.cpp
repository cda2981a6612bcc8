// Packs and micro-batches as wholes.

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "balance.h"
#include "input.h"
#include "item.h"
#include "mixing.h"
#include "packing.h"

namespace hbp::fuzz {
namespace {

template <typename Id>
void FuzzBalanceOf(Input* input) {
  Shape shape(input);
  shape.longest = std::min(shape.longest, int64_t{1} << 20);  // squares of any pack fit 64 bits
  const auto items = PickItems<Id>(input, shape);
  const int64_t num_packs = input->Pick(1, 30);
  Random random(input->Seed());
  std::vector<Id> pack_of;
  for (int64_t i = 0; i < shape.num; ++i) {
    pack_of.push_back(static_cast<Id>(random.Below(num_packs)));
  }
  const auto sums_of = [&](int64_t num) {
    return SumPacks(items.data(), pack_of.data(), shape.num, num);
  };
  const Buffer<PackSum> sums = sums_of(num_packs);
  std::vector<int64_t> starts;
  const Buffer<Id> grouped = Group(items.data(), pack_of.data(), shape.num, num_packs, &starts);
  Check(starts.front() == 0 && starts.back() == shape.num, "offsets cover the items");
  for (int64_t pack = 0; pack < num_packs; ++pack) {
    Check(sums[pack].count == starts[pack + 1] - starts[pack], "sums count items");
  }
  const Buffer<Id> ids = Gather(items.data(), pack_of.data(), shape.num, starts.data(), num_packs);
  for (int64_t pack = 0; pack < num_packs; ++pack) {
    for (int64_t place = starts[pack]; place < starts[pack + 1]; ++place) {
      Check(ids[place] == grouped[place], "packs are grouped in their order");
      Check(pack_of[ids[place]] == pack, "ids are with their pack");
      Check(place == starts[pack] || ids[place - 1] < ids[place], "ids keep their order");
    }
  }
  const int64_t num_groups = input->Pick(1, 6);
  const int64_t num_sources = input->Pick(0, 4);
  std::vector<int32_t> group_of, source_of;
  for (int64_t pack = 0; pack < num_packs; ++pack) {
    group_of.push_back(static_cast<int32_t>(random.Below(num_groups)));
  }
  for (int64_t i = 0; num_sources > 0 && i < shape.num; ++i) {
    source_of.push_back(static_cast<int32_t>(random.Below(num_sources)));
  }
  std::vector<int64_t> bins(input->Pick(0, 7));
  for (int64_t& bin : bins) bin = input->Pick(0, shape.capacity);
  std::sort(bins.begin(), bins.end());
  const auto num_bins = static_cast<int64_t>(bins.size());
  const Buffer<int64_t> tokens =
      ClassTokens(items.data(), pack_of.data(), shape.num, group_of.data(), num_groups, bins.data(),
                  num_bins, num_sources > 0 ? source_of.data() : nullptr, num_sources);
  for (int64_t group = 0; group < num_groups; ++group) {
    const int64_t* row = tokens.begin() + group * (num_bins + 1 + num_sources);
    int64_t wanted = 0;
    for (int64_t k = 0; k < num_packs; ++k) wanted += group_of[k] == group ? sums[k].tokens : 0;
    Check(std::accumulate(row, row + num_bins + 1, int64_t{0}) == wanted, "tokens by length");
    row += num_bins + 1;
    Check(num_sources == 0 || std::accumulate(row, row + num_sources, int64_t{0}) == wanted,
          "tokens by source");
  }
  std::vector<int64_t> chosen(num_packs);
  std::iota(chosen.begin(), chosen.end(), 0);
  chosen.resize(input->Pick(0, num_packs));
  const auto num_chosen = static_cast<int64_t>(chosen.size());
  const int64_t num_new = input->Pick(0, 2 * num_packs);
  const int64_t capacity = input->Pick(1, INT32_MAX);
  const Buffer<PackSum> spread = SpreadPacks(items.data(), pack_of.data(), shape.num, capacity, 1,
                                             chosen.data(), num_chosen, num_new, num_packs);
  const Buffer<PackSum> after = sums_of(num_packs + num_new);
  int64_t before_tokens = 0;
  int64_t after_tokens = 0;
  bool was_over = false;
  bool has_single = false;
  for (const int64_t pack : chosen) has_single = has_single || sums[pack].count < 2;
  for (int64_t k = 0; k < num_chosen + num_new; ++k) {
    const int64_t pack = k < num_chosen ? chosen[k] : num_packs + k - num_chosen;
    Check(spread[k].tokens == after[pack].tokens && spread[k].count == after[pack].count,
          "sums of spread packs");
    after_tokens += after[pack].tokens;
    if (k < num_chosen) {
      before_tokens += sums[pack].tokens;
      was_over = was_over || sums[pack].tokens > capacity;
    }
    Check(k <= num_chosen || after[pack].count == 0 || after[pack - 1].count > 0 || has_single,
          "empty new packs are the last ones");
  }
  Check(before_tokens == after_tokens, "spreading keeps the tokens");
  for (int64_t k = 0; k < num_chosen + num_new && !was_over; ++k) {
    Check(spread[k].tokens <= capacity, "spreading keeps the capacity");
  }
}

}  // namespace

void FuzzBalance(Input* input) {
  if (input->Flip()) {
    FuzzBalanceOf<int32_t>(input);
  } else {
    FuzzBalanceOf<int64_t>(input);
  }
}

void FuzzSteps(Input* input) {
  const int64_t per_step = input->Pick(1, 8);
  const int64_t num_ranks = input->Pick(1, 12);
  const int64_t num = per_step * input->Pick(0, 40);
  Random random(input->Seed());
  std::vector<int64_t> starts(1, 0);
  for (int64_t k = 0; k < num; ++k) {
    int64_t replicas = 1 + random.Below(num_ranks);
    while (num_ranks % replicas != 0) --replicas;
    starts.push_back(starts.back() + replicas);
  }
  std::vector<double> costs;
  const int64_t most = input->Pick(1, INT32_MAX);
  for (int64_t pack = 0; pack < starts.back(); ++pack) {
    costs.push_back(static_cast<double>(random.Below(most)));
  }
  const Buffer<int64_t> order = ReplicaOrder(costs.data(), starts.data(), num, per_step, num_ranks);
  for (int64_t k = 0; k < num; ++k) {
    std::vector<int64_t> packs(order.begin() + starts[k], order.begin() + starts[k + 1]);
    std::sort(packs.begin(), packs.end());
    for (int64_t& pack : packs) Check(pack == starts[k] + (&pack - packs.data()), "packs stay");
  }
  const int64_t num_classes = input->Pick(0, 6);
  std::vector<int64_t> deviations, peaks;
  for (int64_t k = 0; k < num * num_classes; ++k) {
    deviations.push_back(random.Below(2 * most + 1) - most);
  }
  for (int64_t k = 0; k < num; ++k) peaks.push_back(random.Below(most));
  const Buffer<int64_t> steps = MixedSteps(deviations.data(), num, num_classes, per_step,
                                           input->Flip() ? peaks.data() : nullptr, random.Next());
  std::vector<int64_t> sorted(steps.begin(), steps.end());
  std::sort(sorted.begin(), sorted.end());
  for (int64_t k = 0; k < num; ++k) Check(sorted[k] == k, "every micro-batch is in a step");
}

}  // namespace hbp::fuzz
