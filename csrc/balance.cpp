#include "balance.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>

#include "parallel.h"

namespace hbp {

template <typename Id>
Buffer<PackSum> SumPacks(const Item<Id>* items, const Id* pack_of, int64_t num, int64_t num_packs) {
  Buffer<PackSum> sums[kHalves];
  InHalves(num, [&](int half) {
    Buffer<PackSum> here(num_packs);
    std::fill(here.begin(), here.end(), PackSum{0, 0, 0});
    const int64_t end = HalfStart(num, half + 1);
    for (int64_t i = HalfStart(num, half); i < end; ++i) {
      const int64_t length = items[i].length;
      PackSum& sum = here[pack_of[i]];
      ++sum.count;
      sum.tokens += length;
      sum.squares += length * length;
    }
    sums[half] = std::move(here);
  });
  for (int64_t pack = 0; pack < num_packs; ++pack) {
    sums[0][pack].count += sums[1][pack].count;
    sums[0][pack].tokens += sums[1][pack].tokens;
    sums[0][pack].squares += sums[1][pack].squares;
  }
  return std::move(sums[0]);
}

namespace {

// Gives each of `places`, by falling length, to the pack of `packs` with least, ties
// by place. Returns the most that a pack holds.
template <typename Id>
int64_t Spread(const Item<Id>* items, const std::vector<int64_t>& places, int64_t multiple,
               const std::vector<int64_t>& packs, Id* pack_of) {
  using Load = std::pair<int64_t, int64_t>;  // tokens, place in packs
  std::priority_queue<Load, std::vector<Load>, std::greater<Load>> loads;
  for (size_t k = 0; k < packs.size(); ++k) loads.emplace(0, static_cast<int64_t>(k));
  int64_t most = 0;
  for (const int64_t place : places) {
    auto [tokens, k] = loads.top();
    loads.pop();
    tokens += RoundUp(items[place].length, multiple);
    most = std::max(most, tokens);
    loads.emplace(tokens, k);
    pack_of[place] = static_cast<Id>(packs[k]);
  }
  return most;
}

}  // namespace

template <typename Id>
Buffer<PackSum> SpreadPacks(const Item<Id>* items, Id* pack_of, int64_t num, int64_t capacity,
                            int64_t multiple, const int64_t* chosen, int64_t num_chosen,
                            int64_t num_new, int64_t num_packs) {
  std::vector<int64_t> index_of(num_packs + num_new, -1);  // by pack, in the answer
  std::vector<int64_t> packs(chosen, chosen + num_chosen);
  for (int64_t k = 0; k < num_new; ++k) packs.push_back(num_packs + k);
  for (size_t k = 0; k < packs.size(); ++k) index_of[packs[k]] = static_cast<int64_t>(k);
  std::vector<std::vector<int64_t>> members(num_chosen);
  std::vector<int64_t> everything;
  for (int64_t i = 0; i < num; ++i) {
    const int64_t index = index_of[pack_of[i]];
    if (index < 0) continue;
    members[index].push_back(i);
    everything.push_back(i);
  }
  const auto by_falling_length = [&](std::vector<int64_t>* places) {
    std::stable_sort(places->begin(), places->end(), [&](int64_t one, int64_t other) {
      return items[one].length > items[other].length;
    });
  };
  by_falling_length(&everything);
  if (Spread(items, everything, multiple, packs, pack_of) > capacity) {
    for (int64_t k = 0; k < num_chosen; ++k) {
      by_falling_length(&members[k]);
      std::vector<int64_t> halves(1, chosen[k]);
      if (k < num_new) halves.push_back(num_packs + k);
      Spread(items, members[k], multiple, halves, pack_of);
    }
  }
  Buffer<PackSum> sums(num_chosen + num_new);
  std::fill(sums.begin(), sums.end(), PackSum{0, 0, 0});
  for (const int64_t place : everything) {
    const int64_t length = items[place].length;
    PackSum& sum = sums[index_of[pack_of[place]]];
    ++sum.count;
    sum.tokens += length;
    sum.squares += length * length;
  }
  return sums;
}

template <typename Id>
Buffer<int64_t> ClassTokens(const Item<Id>* items, const Id* pack_of, int64_t num,
                            const int32_t* group_of, int64_t num_groups, const int64_t* bins,
                            int64_t num_bins, const int32_t* source_of, int64_t num_sources) {
  const int64_t num_classes = num_bins + 1 + num_sources;
  int32_t longest = 0;
  for (int64_t i = 0; i < num; ++i) longest = std::max(longest, items[i].length);
  const auto class_of = [&](int64_t length) {
    int64_t bin = 0;
    for (int64_t k = 0; k < num_bins; ++k) bin += length > bins[k];
    return bin;
  };
  // by length, where a table is smaller than the sequences
  std::vector<uint8_t> table;
  if (longest < num && num_bins < 256) {
    for (int64_t length = 0; length <= longest; ++length) {
      table.push_back(static_cast<uint8_t>(class_of(length)));
    }
  }
  Buffer<int64_t> tokens[kHalves];
  InHalves(num, [&](int half) {
    Buffer<int64_t> here(num_groups * num_classes);
    std::fill(here.begin(), here.end(), 0);
    const int64_t end = HalfStart(num, half + 1);
    for (int64_t i = HalfStart(num, half); i < end; ++i) {
      const int64_t length = items[i].length;
      int64_t* row = here.data() + group_of[pack_of[i]] * num_classes;
      row[table.empty() ? class_of(length) : table[length]] += length;
      if (source_of != nullptr) row[num_bins + 1 + source_of[items[i].id]] += length;
    }
    tokens[half] = std::move(here);
  });
  for (int64_t cell = 0; cell < num_groups * num_classes; ++cell) {
    tokens[0][cell] += tokens[1][cell];
  }
  return std::move(tokens[0]);
}

Buffer<int64_t> ReplicaOrder(const double* costs, const int64_t* starts, int64_t num_microbatches,
                             int64_t per_step, int64_t num_ranks) {
  Buffer<int64_t> order(starts[num_microbatches]);
  std::vector<double> busy(num_ranks);
  std::vector<std::pair<double, int64_t>> packs;
  std::vector<std::pair<double, int64_t>> replicas;
  for (int64_t microbatch = 0; microbatch < num_microbatches; ++microbatch) {
    if (microbatch % per_step == 0) std::fill(busy.begin(), busy.end(), 0.0);
    const int64_t first = starts[microbatch];
    const int64_t num_replicas = starts[microbatch + 1] - first;
    const int64_t cp_size = num_ranks / num_replicas;
    packs.clear();
    replicas.clear();
    for (int64_t k = 0; k < num_replicas; ++k) {
      packs.emplace_back(-costs[first + k], first + k);
      const auto ranks = busy.begin() + k * cp_size;
      replicas.emplace_back(*std::max_element(ranks, ranks + cp_size), k);
    }
    std::sort(packs.begin(), packs.end());
    std::sort(replicas.begin(), replicas.end());
    for (int64_t k = 0; k < num_replicas; ++k) {
      const int64_t replica = replicas[k].second;
      order[first + replica] = packs[k].second;
      for (int64_t rank = replica * cp_size; rank < (replica + 1) * cp_size; ++rank) {
        busy[rank] -= packs[k].first;
      }
    }
  }
  return order;
}

#define HBP_INSTANTIATE(Id)                                                                 \
  template Buffer<PackSum> SumPacks(const Item<Id>*, const Id*, int64_t, int64_t);          \
  template Buffer<PackSum> SpreadPacks(const Item<Id>*, Id*, int64_t, int64_t, int64_t,     \
                                       const int64_t*, int64_t, int64_t, int64_t);          \
  template Buffer<int64_t> ClassTokens(const Item<Id>*, const Id*, int64_t, const int32_t*, \
                                       int64_t, const int64_t*, int64_t, const int32_t*, int64_t);
HBP_INSTANTIATE(int32_t)
HBP_INSTANTIATE(int64_t)
#undef HBP_INSTANTIATE

}  // namespace hbp
