#include "packing.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "parallel.h"
#include "random.h"
#include "spaces.h"

namespace hbp {
namespace {

// The end of the run of items of one length that starts at `first`.
template <typename Id>
int64_t RunEnd(const Item<Id>* items, int64_t first, int64_t num) {
  int64_t end = first + 1;
  while (end < num && items[end].length == items[first].length) ++end;
  return end;
}

// Places items into the packs of `spaces` and, numbered from num_packs on, into new ones; returns
// how many packs there are then. kRuns: items of equal length that follow each other go together.
template <bool kRuns, typename Id, typename Spaces>
Id PlaceBestFit(const Item<Id>* items, int64_t num, int64_t capacity, int64_t multiple,
                Id num_packs, Spaces* spaces, Id* pack_of) {
  for (int64_t first = 0; first < num;) {
    const int64_t charge = RoundUp(items[first].length, multiple);
    const int64_t end = kRuns ? RunEnd(items, first, num) : first + 1;
    while (first < end) {
      int64_t space;
      Id pack = spaces->Take(charge, &space);
      if (pack < 0) {
        pack = num_packs++;
        space = capacity;
      }
      int64_t fitting = 1;
      if (kRuns && end - first > 1) fitting = std::min(end - first, space / charge);
      spaces->Put(pack, space - fitting * charge);
      for (; fitting > 0; --fitting) pack_of[first++] = pack;
    }
  }
  return num_packs;
}

template <typename Id, typename Spaces>
Id BestFitIn(const Item<Id>* items, int64_t num, int64_t capacity, int64_t multiple,
             bool in_streams, Id* pack_of) {
  CheckCharges(items, num, capacity, multiple);
  Spaces spaces(capacity);
  if (!in_streams || num < kManyItems) {
    return PlaceBestFit<true, Id>(items, num, capacity, multiple, 0, &spaces, pack_of);
  }
  const int64_t stream = num / 64 * 31;
  Id num_packs[kHalves];
  Buffer<int64_t> space[kHalves];
  const auto place = [&](int half) {
    Spaces own(capacity);
    num_packs[half] = PlaceBestFit<false, Id>(items + half * stream, stream, capacity, multiple, 0,
                                              &own, pack_of + half * stream);
    space[half] = Buffer<int64_t>(num_packs[half]);
    own.ForEach([&](Id pack, int64_t free) { space[half][pack] = free; });
  };
  InHalves(num, place);
  for (int64_t i = stream; i < 2 * stream; ++i) pack_of[i] += num_packs[0];
  Id both = 0;
  for (const auto& half : space) {
    for (const int64_t free : half) spaces.Put(both++, free);
  }
  return PlaceBestFit<false, Id>(items + 2 * stream, num - 2 * stream, capacity, multiple, both,
                                 &spaces, pack_of + 2 * stream);
}

}  // namespace

template <typename Id>
Id BestFit(const Item<Id>* items, int64_t num, int64_t capacity, int64_t multiple, bool in_streams,
           Id* pack_of) {
  if (!IsDense(capacity, num)) {
    return BestFitIn<Id, SparseSpaces<Id>>(items, num, capacity, multiple, in_streams, pack_of);
  }
  if (capacity < CompactSet::kMostMembers) {
    return BestFitIn<Id, DenseSpaces<Id, CompactSet>>(items, num, capacity, multiple, in_streams,
                                                      pack_of);
  }
  return BestFitIn<Id, DenseSpaces<Id, SuccessorSet<6>>>(items, num, capacity, multiple, in_streams,
                                                         pack_of);
}

template <typename Id>
Id FirstFit(const Item<Id>* items, int64_t num, int64_t capacity, int64_t multiple, Id* pack_of) {
  CheckCharges(items, num, capacity, multiple);
  int64_t total = 0;
  for (int64_t i = 0; i < num; ++i) total += RoundUp(items[i].length, multiple);
  // All packs but one are more than half full, so there are never more than this.
  const int64_t most_packs = std::min(num, 2 * (total / capacity) + 2);
  int64_t leaves = 1;
  while (leaves < most_packs) leaves *= 2;
  // A tournament tree over free tokens, all packs empty: node i has children 2i and 2i + 1.
  std::vector<int32_t> space(static_cast<size_t>(2 * leaves), static_cast<int32_t>(capacity));
  Id num_packs = 0;
  for (int64_t first = 0; first < num;) {
    const int64_t charge = RoundUp(items[first].length, multiple);
    const int64_t end = RunEnd(items, first, num);
    while (first < end) {
      int64_t node = 1;
      while (node < leaves) {
        node *= 2;
        if (space[node] < charge) ++node;
      }
      const auto pack = static_cast<Id>(node - leaves);
      num_packs = std::max<Id>(num_packs, pack + 1);
      const int64_t fitting = std::min<int64_t>(end - first, space[node] / charge);
      space[node] -= static_cast<int32_t>(fitting * charge);
      std::fill_n(pack_of + first, fitting, pack);
      first += fitting;
      for (node /= 2; node >= 1; node /= 2) {
        space[node] = std::max(space[2 * node], space[2 * node + 1]);
      }
    }
  }
  return num_packs;
}

template <typename Id>
Id NextFit(const Item<Id>* items, int64_t num, int64_t capacity, int64_t multiple, Id* pack_of) {
  CheckCharges(items, num, capacity, multiple);
  Id num_packs = 0;
  int64_t space = 0;
  for (int64_t i = 0; i < num; ++i) {
    const int64_t charge = RoundUp(items[i].length, multiple);
    if (charge > space) {
      ++num_packs;
      space = capacity;
    }
    space -= charge;
    pack_of[i] = num_packs - 1;
  }
  return num_packs;
}

template <typename Id>
Id IterativeSampling(Item<Id>* items, int64_t num, int64_t capacity, int64_t multiple,
                     int64_t threshold, int64_t iterations, uint64_t seed, Id* pack_of) {
  CheckCharges(items, num, capacity, multiple);
  Id num_packs = 0;
  Buffer<Item<Id>> rest(num);
  Random random(seed);
  int64_t done = 0;  // items before this are in packs that are kept
  for (int64_t iteration = 1; done < num; ++iteration) {
    const bool is_last = iteration >= iterations;
    int64_t kept = done;
    int64_t num_rest = 0;
    int64_t first = done;
    while (first < num) {
      int64_t load = 0;
      int64_t end = first;
      for (; end < num; ++end) {
        const int64_t charge = RoundUp(items[end].length, multiple);
        if (load + charge > capacity) break;
        load += charge;
      }
      if (load >= threshold || is_last) {
        for (; first < end; ++first) {
          items[kept] = items[first];
          pack_of[kept++] = num_packs;
        }
        ++num_packs;
      } else {
        for (; first < end; ++first) rest[num_rest++] = items[first];
      }
    }
    std::copy_n(rest.data(), num_rest, items + kept);
    done = kept;
    Shuffle(items + done, num_rest, &random);
  }
  return num_packs;
}

namespace {

// Ids by pack. place_packs(next) is told how many items of each half every pack has, and turns that
// into where they go.
template <typename Id, typename PlacePacks>
Buffer<Id> IdsByPack(const Item<Id>* items, const Id* pack_of, int64_t num, int64_t num_packs,
                     const PlacePacks& place_packs) {
  Buffer<Id> ids;
  std::vector<int64_t> next[kHalves];
  const auto count = [&](int half) {
    std::vector<int64_t> counts(static_cast<size_t>(num_packs), 0);
    const int64_t end = HalfStart(num, half + 1);
    for (int64_t i = HalfStart(num, half); i < end; ++i) {
      const auto pack = static_cast<uint64_t>(static_cast<int64_t>(pack_of[i]));
      if (pack >= static_cast<uint64_t>(num_packs)) {
        throw std::invalid_argument("pack_of must hold numbers below the number of packs");
      }
      ++counts[pack];
    }
    next[half] = std::move(counts);
  };
  const auto write = [&](int half) {
    int64_t* to = next[half].data();
    const int64_t end = HalfStart(num, half + 1);
    for (int64_t i = HalfStart(num, half); i < end; ++i) ids[to[pack_of[i]]++] = items[i].id;
  };
  InHalves(num, count);
  place_packs(next);
  ids = Buffer<Id>(num);
  InHalves(num, write);
  return ids;
}

}  // namespace

template <typename Id>
Buffer<Id> Gather(const Item<Id>* items, const Id* pack_of, int64_t num, const int64_t* starts,
                  int64_t num_packs) {
  return IdsByPack(items, pack_of, num, num_packs, [&](std::vector<int64_t>(&next)[kHalves]) {
    // The second half of the items starts in each pack where the first one ends.
    for (int64_t pack = 0; pack < num_packs; ++pack) {
      const int64_t start = starts[pack];
      const int64_t count = next[0][pack] + next[1][pack];
      if (start < 0 || start > num - count) {
        throw std::invalid_argument("starts must leave room for every pack");
      }
      next[1][pack] = start + next[0][pack];
      next[0][pack] = start;
    }
  });
}

template <typename Id>
Buffer<Id> Group(const Item<Id>* items, const Id* pack_of, int64_t num, int64_t num_packs,
                 std::vector<int64_t>* offsets) {
  offsets->assign(1, 0);
  offsets->reserve(num_packs + 1);
  return IdsByPack(items, pack_of, num, num_packs, [&](std::vector<int64_t>(&next)[kHalves]) {
    for (int64_t pack = 0; pack < num_packs; ++pack) {
      const int64_t start = offsets->back();
      const int64_t middle = start + next[0][pack];
      offsets->push_back(middle + next[1][pack]);
      next[0][pack] = start;
      next[1][pack] = middle;
    }
  });
}

#define HBP_INSTANTIATE(Id)                                                                       \
  template Id BestFit(const Item<Id>*, int64_t, int64_t, int64_t, bool, Id*);                     \
  template Id FirstFit(const Item<Id>*, int64_t, int64_t, int64_t, Id*);                          \
  template Id NextFit(const Item<Id>*, int64_t, int64_t, int64_t, Id*);                           \
  template Id IterativeSampling(Item<Id>*, int64_t, int64_t, int64_t, int64_t, int64_t, uint64_t, \
                                Id*);                                                             \
  template Buffer<Id> Gather(const Item<Id>*, const Id*, int64_t, const int64_t*, int64_t);       \
  template Buffer<Id> Group(const Item<Id>*, const Id*, int64_t, int64_t, std::vector<int64_t>*);
HBP_INSTANTIATE(int32_t)
HBP_INSTANTIATE(int64_t)
#undef HBP_INSTANTIATE

}  // namespace hbp
