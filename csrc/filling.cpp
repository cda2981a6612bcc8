#include "filling.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "order.h"
#include "random.h"
#include "spaces.h"
#include "successor_set.h"

namespace hbp {
namespace {

// Sequences by ascending length, each of them still there or taken.
template <typename Id>
class Pool {
 public:
  Pool(const Item<Id>* items, int64_t num, int64_t capacity, int64_t multiple)
      : sorted_(num), charges_(num), there_(num + 1) {
    for (int64_t i = 0; i < num; ++i) sorted_[i] = {static_cast<Id>(i), items[i].length};
    SortByLength(sorted_.data(), num, false);
    for (int64_t i = 0; i < num; ++i) {
      charges_[i] = static_cast<int32_t>(RoundUp(sorted_[i].length, multiple));
    }
    there_.InsertUpTo(num);
    if (!IsDense(capacity, num)) return;
    counts_ = Buffer<Id>(capacity + 1);
    int64_t rank = 0;
    for (int64_t tokens = 0; tokens <= capacity; ++tokens) {
      while (rank < num && charges_[rank] <= tokens) ++rank;
      counts_[tokens] = static_cast<Id>(rank);
    }
  }

  int64_t charge(int64_t rank) const { return charges_[rank]; }
  int64_t Take(int64_t rank) {
    there_.Erase(rank);
    return sorted_[rank].id;
  }

  // The first one there at or after a rank, the last one at or before it, or -1.
  int64_t Next(int64_t rank) const { return there_.Next(rank); }
  int64_t Previous(int64_t rank) const { return there_.Previous(rank); }
  // The first one there of all, which never moves down, or -1.
  int64_t First() { return first_ = Next(std::max<int64_t>(first_, 0)); }
  // The longest one there that takes at most `tokens`, the shortest that takes more, or -1.
  int64_t LongestUpTo(int64_t tokens) const { return Previous(NumUpTo(tokens) - 1); }
  int64_t ShortestAbove(int64_t tokens) const { return Next(NumUpTo(tokens)); }

 private:
  int64_t NumUpTo(int64_t tokens) const {
    if (counts_.size() > 0) return counts_[tokens];
    return std::upper_bound(charges_.begin(), charges_.end(), tokens) - charges_.begin();
  }

  Buffer<Item<Id>> sorted_;  // id: the place in `items`
  Buffer<int32_t> charges_;
  Buffer<Id> counts_;  // by tokens, for capacities that fit a table
  SuccessorSet<6> there_;
  int64_t first_ = 0;
};

}  // namespace

template <typename Id>
Id LookAhead(const Item<Id>* items, int64_t num, int64_t capacity, int64_t multiple, uint64_t seed,
             Id* pack_of) {
  Id num_packs = 0;
  CheckCharges(items, num, capacity, multiple);
  Pool<Id> pool(items, num, capacity, multiple);
  Random random(seed);
  // One there among ranks from .. to, at random; `to` is there.
  const auto draw = [&](int64_t from, int64_t to) {
    int64_t found = -1;
    for (int draws = 0; draws < kDraws; ++draws) {
      const int64_t rank = from + random.Below(to - from + 1);
      found = pool.Next(rank);
      if (found == rank) break;
    }
    return found;
  };
  for (int64_t last; (last = pool.Previous(num - 1)) >= 0; ++num_packs) {
    int64_t space = capacity;
    const auto take = [&](int64_t rank) {
      space -= pool.charge(rank);
      pack_of[pool.Take(rank)] = num_packs;
    };
    take(2 * pool.charge(last) > capacity ? last : draw(0, last));
    while (true) {
      const int64_t shortest = pool.First();
      if (shortest < 0 || pool.charge(shortest) > space) break;
      const int64_t least = pool.charge(shortest);
      const int64_t longest = pool.LongestUpTo(space);
      const int64_t most = pool.charge(longest);
      if (space - most < least) {
        take(longest);
        break;
      }
      const int64_t num_more = (space + most - 1) / most;  // at least two
      const int64_t low = std::max(least, space - (num_more - 1) * most);
      const int64_t high = std::min(most, space - (num_more - 1) * least);
      const int64_t from = pool.ShortestAbove(low - 1);
      const int64_t to = high < least ? -1 : pool.LongestUpTo(high);
      if (num_more > 2 || from > to) {
        take(from > to ? longest : draw(from, to));
        continue;
      }
      int64_t gap = space - most;
      int64_t one = longest;
      int64_t two = -1;
      for (int pair = 0; pair < kPairs && gap > 0; ++pair) {
        const int64_t first = draw(from, to);
        const int64_t rest = space - pool.charge(first);
        int64_t second = pool.LongestUpTo(rest);
        if (second == first) second = pool.Previous(first - 1);
        if (second < 0 || rest - pool.charge(second) >= gap) continue;
        gap = rest - pool.charge(second);
        one = first;
        two = second;
      }
      take(one);
      if (two >= 0) take(two);
    }
  }
  return num_packs;
}

template <typename Id>
int64_t GreedyFill(Item<Id>* items, int64_t num, int64_t multiple, int64_t* spaces,
                   int64_t num_packs, Id first_pack, Id* pack_of) {
  int64_t front = 0;
  int64_t aside = num;  // items from here on were put aside
  int64_t mean = 0;
  for (int64_t i = 0; i < num; ++i) mean += items[i].length;
  if (num > 0) mean /= num;
  for (int64_t pack = 0; pack < num_packs; ++pack) {
    int64_t space = spaces[pack];
    bool at_random = true;
    bool renewed = false;
    while (front < num && space > 0) {
      if (RoundUp(items[front].length, multiple) > space) at_random = false;
      if (!at_random) {
        const int64_t end = std::min(front + kWindow, num);
        // The longest that fits takes at most this many tokens before rounding up.
        const int64_t limit = space / multiple * multiple;
        int32_t longest = 0;
        for (int64_t i = front; i < end; ++i) {
          const int32_t length = items[i].length;
          longest = std::max(longest, length <= limit ? length : 0);
        }
        if (longest == 0) {
          if (renewed || space < mean || num - front < 2 * kWindow) break;
          if (aside - front < 2 * kWindow) aside = num;
          aside -= kWindow;
          std::swap_ranges(items + front, items + front + kWindow, items + aside);
          renewed = true;
          continue;
        }
        int64_t found = front;
        while (items[found].length != longest) ++found;
        std::swap(items[front], items[found]);
      }
      space -= RoundUp(items[front].length, multiple);
      pack_of[front++] = first_pack + static_cast<Id>(pack);
    }
    spaces[pack] = space;
  }
  return front;
}

#define HBP_INSTANTIATE(Id)                                                         \
  template Id LookAhead(const Item<Id>*, int64_t, int64_t, int64_t, uint64_t, Id*); \
  template int64_t GreedyFill(Item<Id>*, int64_t, int64_t, int64_t*, int64_t, Id, Id*);
HBP_INSTANTIATE(int32_t)
HBP_INSTANTIATE(int64_t)
#undef HBP_INSTANTIATE

}  // namespace hbp
