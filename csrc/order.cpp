#include "order.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "parallel.h"
#include "random.h"

namespace hbp {
namespace {

constexpr int kMostBucketBits = 11;
constexpr int64_t kBucketSize = 4096;

// How many bits of randomness choose a bucket, for `num` items.
int BucketBits(int64_t num) {
  int bits = 0;
  while (bits < kMostBucketBits && (num >> bits) > kBucketSize) ++bits;
  return bits;
}

template <typename T>
void Shuffle(T* items, int64_t num, Random* random) {
  for (int64_t last = num - 1; last > 0; --last) {
    std::swap(items[last], items[random->Below(last + 1)]);
  }
}

// Calls visit(id, length, level, 16 random bits) for the places first .. end - 1 of the input,
// whose sequence is not empty. first is a multiple of 4.
template <typename Length, typename Id, typename Visit>
void ForEach(const Length* lengths, const Id* chosen, int64_t first, int64_t end,
             const int64_t* limits, int64_t num_levels, uint64_t seed, Visit visit) {
  const auto one = [&](int64_t place, uint64_t bits) {
    const Id id = chosen == nullptr ? static_cast<Id>(place) : chosen[place];
    const int64_t length = lengths[id];
    if (length == 0) return;
    int64_t level = 0;
    for (int64_t shorter = 0; shorter < num_levels - 1; ++shorter) {
      level += length > limits[shorter];
    }
    visit(id, length, level, static_cast<uint32_t>(bits & 0xffff));
  };
  for (int64_t place = first; place < end;) {
    uint64_t word = Mix(seed + static_cast<uint64_t>(place / 4 + 1) * kGolden);
    for (const int64_t stop = std::min(place + 4, end); place < stop; ++place) {
      one(place, word);
      word >>= 16;
    }
  }
}

// Turns counts[half][bucket] into where each half's first item of each bucket goes; returns where
// every bucket starts, and the end.
std::vector<int64_t> Starts(std::vector<int64_t> (&counts)[kHalves]) {
  std::vector<int64_t> starts(1, 0);
  for (size_t bucket = 0; bucket < counts[0].size(); ++bucket) {
    int64_t next = starts.back();
    for (auto& half : counts) {
      const int64_t count = half[bucket];
      half[bucket] = next;
      next += count;
    }
    starts.push_back(next);
  }
  return starts;
}

}  // namespace

template <typename Length, typename Id>
LevelItems<Id> ShuffledByLevel(const Length* lengths, const Id* chosen, int64_t num,
                               const int64_t* limits, int64_t num_levels, uint64_t seed) {
  const auto for_half = [&](int half, auto visit) {
    ForEach(lengths, chosen, HalfStart(num, half), HalfStart(num, half + 1), limits, num_levels,
            seed, visit);
  };
  std::vector<int64_t> sizes[kHalves];
  InHalves(num, [&](int half) {
    std::vector<int64_t> counts(num_levels, 0);
    for_half(half, [&](Id id, int64_t length, int64_t level, uint32_t) {
      if (length < 0 || length > limits[num_levels - 1]) {
        throw std::invalid_argument("sequence " + std::to_string(id) + " has " +
                                    std::to_string(length) + " tokens; it must have 0 to " +
                                    std::to_string(limits[num_levels - 1]));
      }
      ++counts[level];
    });
    sizes[half] = std::move(counts);
  });
  LevelItems<Id> result;
  result.starts.assign(1, 0);
  std::vector<int> shifts(num_levels);  // from 16 random bits to a bucket of the level
  std::vector<int64_t> first_buckets(num_levels);
  int64_t num_buckets = 0;
  for (int64_t level = num_levels - 1; level >= 0; --level) {
    const int64_t size = sizes[0][level] + sizes[1][level];
    result.starts.push_back(result.starts.back() + size);
    const int bits = BucketBits(size);
    shifts[level] = 16 - bits;
    first_buckets[level] = num_buckets;
    num_buckets += int64_t{1} << bits;
  }
  const auto bucket_of = [&](int64_t level, uint32_t bits) {
    return first_buckets[level] + (bits >> shifts[level]);
  };
  std::vector<int64_t> next[kHalves];
  InHalves(num, [&](int half) {
    std::vector<int64_t> counts(num_buckets, 0);
    for_half(half,
             [&](Id, int64_t, int64_t level, uint32_t bits) { ++counts[bucket_of(level, bits)]; });
    next[half] = std::move(counts);
  });
  const std::vector<int64_t> starts = Starts(next);
  result.items = Buffer<Item<Id>>(starts.back());
  Item<Id>* items = result.items.data();
  InHalves(num, [&](int half) {
    int64_t* place = next[half].data();
    for_half(half, [&](Id id, int64_t length, int64_t level, uint32_t bits) {
      items[place[bucket_of(level, bits)]++] = {id, static_cast<int32_t>(length)};
    });
  });
  InHalves(num, [&](int half) {
    const int64_t end = HalfStart(num_buckets, half + 1);
    for (int64_t bucket = HalfStart(num_buckets, half); bucket < end; ++bucket) {
      Random random(Mix(seed) + static_cast<uint64_t>(bucket));
      Shuffle(items + starts[bucket], starts[bucket + 1] - starts[bucket], &random);
    }
  });
  return result;
}

template <typename Id>
Buffer<Item<Id>> SortedByLength(const Item<Id>* items, int64_t num, bool descending) {
  Buffer<Item<Id>> sorted(num);
  int32_t longest = 0;
  for (int64_t i = 0; i < num; ++i) longest = std::max(longest, items[i].length);
  // A radix sort with digits of at most 9 bits: few enough streams for the cache.
  int bits = 1;
  while (bits < 31 && (longest >> bits) > 0) ++bits;
  const int num_digits = (bits + 8) / 9;
  const int digit_bits = (bits + num_digits - 1) / num_digits;
  const int32_t mask = (int32_t{1} << digit_bits) - 1;
  const int32_t flip = descending ? mask : 0;
  Buffer<Item<Id>> scratch(num_digits > 1 ? num : 0);
  const Item<Id>* from = items;
  for (int digit = 0; digit < num_digits; ++digit) {
    const auto value_of = [=](const Item<Id>& item) {
      return ((item.length >> (digit * digit_bits)) & mask) ^ flip;
    };
    Item<Id>* to = (num_digits - digit) % 2 == 1 ? sorted.data() : scratch.data();
    std::vector<int64_t> next[kHalves];
    InHalves(num, [&](int half) {
      std::vector<int64_t> counts(static_cast<size_t>(mask) + 1, 0);
      const int64_t end = HalfStart(num, half + 1);
      for (int64_t i = HalfStart(num, half); i < end; ++i) ++counts[value_of(from[i])];
      next[half] = std::move(counts);
    });
    Starts(next);
    InHalves(num, [&](int half) {
      int64_t* place = next[half].data();
      const int64_t end = HalfStart(num, half + 1);
      for (int64_t i = HalfStart(num, half); i < end; ++i) to[place[value_of(from[i])]++] = from[i];
    });
    from = to;
  }
  return sorted;
}

template <typename Id>
Buffer<Item<Id>> Descending(const Item<Id>* items, int64_t num, uint64_t seed) {
  Buffer<Item<Id>> sorted = SortedByLength(items, num, true);
  InHalves(num, [&](int half) {
    // Runs of equal lengths are shuffled by the half that they start in.
    const int64_t end = HalfStart(num, half + 1);
    int64_t first = HalfStart(num, half);
    while (first > 0 && first < num && sorted[first].length == sorted[first - 1].length) ++first;
    while (first < end) {
      int64_t run_end = first + 1;
      while (run_end < num && sorted[run_end].length == sorted[first].length) ++run_end;
      Random random(Mix(seed) + static_cast<uint64_t>(sorted[first].length));
      Shuffle(sorted.data() + first, run_end - first, &random);
      first = run_end;
    }
  });
  return sorted;
}

#define HBP_INSTANTIATE(Id)                                                                   \
  template LevelItems<Id> ShuffledByLevel(const int32_t*, const Id*, int64_t, const int64_t*, \
                                          int64_t, uint64_t);                                 \
  template LevelItems<Id> ShuffledByLevel(const int64_t*, const Id*, int64_t, const int64_t*, \
                                          int64_t, uint64_t);                                 \
  template Buffer<Item<Id>> SortedByLength(const Item<Id>*, int64_t, bool);                   \
  template Buffer<Item<Id>> Descending(const Item<Id>*, int64_t, uint64_t);
HBP_INSTANTIATE(int32_t)
HBP_INSTANTIATE(int64_t)
#undef HBP_INSTANTIATE

}  // namespace hbp
