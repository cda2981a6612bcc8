// Sequences by level, in random order and by length.

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

#include "input.h"
#include "item.h"
#include "order.h"

namespace hbp::fuzz {
namespace {

template <typename Length, typename Id>
void FuzzOrderOf(Input* input) {
  const Shape shape(input);
  const auto items = PickItems<Id>(input, shape);
  std::vector<Length> lengths;
  for (const Item<Id>& item : items) lengths.push_back(input->Pick(0, 9) == 1 ? 0 : item.length);
  std::vector<int64_t> limits(input->Pick(1, 5));
  for (int64_t& limit : limits) limit = input->Pick(0, shape.longest);
  limits.back() = shape.longest;
  std::sort(limits.begin(), limits.end());
  const auto num_levels = static_cast<int64_t>(limits.size());
  std::vector<Id> chosen;
  const bool is_chosen = input->Flip() && shape.num > 0;
  Random random(input->Seed());
  for (int64_t i = 0; is_chosen && i < shape.num; ++i) {
    chosen.push_back(static_cast<Id>(random.Below(shape.num)));
  }
  std::vector<Item<Id>> wanted;
  for (int64_t i = 0; i < shape.num; ++i) {
    const Id id = is_chosen ? chosen[i] : static_cast<Id>(i);
    if (lengths[id] > 0) wanted.push_back({id, static_cast<int32_t>(lengths[id])});
  }
  const uint64_t seed = input->Seed();
  const LevelItems<Id> levels = ShuffledByLevel(lengths.data(), is_chosen ? chosen.data() : nullptr,
                                                shape.num, limits.data(), num_levels, seed);
  Check(Sorted(levels.items.begin(), levels.items.end()) == Sorted(wanted.begin(), wanted.end()),
        "every sequence is in a level");
  Check(levels.starts.front() == 0 && levels.starts.back() == levels.items.size(), "levels cover");
  for (int64_t k = 0; k < num_levels; ++k) {
    const int64_t level = num_levels - 1 - k;
    for (int64_t i = levels.starts[k]; i < levels.starts[k + 1]; ++i) {
      const int32_t length = levels.items[i].length;
      Check(length <= limits[level] && (level == 0 || length > limits[level - 1]), "level fits");
    }
  }
  const auto is_longer = [](const Item<Id>& one, const Item<Id>& other) {
    return one.length > other.length;
  };
  std::vector<Item<Id>> falling(items.begin(), items.end());
  SortDescending(falling.data(), shape.num, seed);
  Check(std::is_sorted(falling.begin(), falling.end(), is_longer), "descending");
  Check(Sorted(falling.begin(), falling.end()) == Sorted(items.begin(), items.end()),
        "descending keeps the items");
  for (const bool descending : {false, true}) {
    std::vector<Item<Id>> sorted(items.begin(), items.end());
    SortByLength(sorted.data(), shape.num, descending);
    for (int64_t i = 1; i < shape.num; ++i) {
      const auto& [one, other] = std::tie(sorted[i - 1], sorted[i]);
      Check(one.length == other.length ? one.id < other.id
                                       : (one.length > other.length) == descending,
            "sorted by length, equal ones in their order");
    }
  }
}

}  // namespace

void FuzzOrder(Input* input) {
  switch (input->Pick(0, 3)) {
    case 0:
      return FuzzOrderOf<int32_t, int32_t>(input);
    case 1:
      return FuzzOrderOf<int64_t, int32_t>(input);
    case 2:
      return FuzzOrderOf<int32_t, int64_t>(input);
    default:
      return FuzzOrderOf<int64_t, int64_t>(input);
  }
}

}  // namespace hbp::fuzz
