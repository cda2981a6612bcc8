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
  const int bucket_bits = BucketBits(num);
  // Buckets by level, the longest level first.
  const auto bucket_of = [=](int64_t level, uint32_t bits) {
    return ((num_levels - 1 - level) << bucket_bits) + (bits >> (16 - bucket_bits));
  };
  const int64_t num_buckets = num_levels << bucket_bits;
  std::vector<int64_t> next[kHalves];
  InHalves(num, [&](int half) {
    std::vector<int64_t> counts(num_buckets, 0);
    int64_t least = 0;
    int64_t most = 0;
    for_half(half, [&](Id, int64_t length, int64_t level, uint32_t bits) {
      least = std::min(least, length);
      most = std::max(most, length);
      ++counts[bucket_of(level, bits)];
    });
    if (least < 0 || most > limits[num_levels - 1]) {
      throw std::invalid_argument("a sequence has less than 0 tokens or more than " +
                                  std::to_string(limits[num_levels - 1]) +
                                  ", the longest that a level holds");
    }
    next[half] = std::move(counts);
  });
  const std::vector<int64_t> starts = Starts(next);
  LevelItems<Id> result;
  for (int64_t level = 0; level <= num_levels; ++level) {
    result.starts.push_back(starts[level << bucket_bits]);
  }
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
void SortByLength(Item<Id>* items, int64_t num, bool descending) {
  int32_t longest = 0;
  for (int64_t i = 0; i < num; ++i) longest = std::max(longest, items[i].length);
  // A radix sort with an even number of digits of at most 9 bits: few enough streams for the cache,
  // and the last digit brings the items back to where they were.
  int bits = 2;
  while (bits < 31 && (longest >> bits) > 0) ++bits;
  const int num_digits = (bits + 17) / 18 * 2;
  const int digit_bits = (bits + num_digits - 1) / num_digits;
  const int32_t mask = (int32_t{1} << digit_bits) - 1;
  const int32_t flip = descending ? mask : 0;
  Buffer<Item<Id>> scratch(num);
  Item<Id>* from = items;
  Item<Id>* to = scratch.data();
  for (int digit = 0; digit < num_digits; ++digit) {
    const auto value_of = [=](const Item<Id>& item) {
      return ((item.length >> (digit * digit_bits)) & mask) ^ flip;
    };
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
    std::swap(from, to);
  }
}

template <typename Id>
void SortDescending(Item<Id>* items, int64_t num, uint64_t seed) {
  SortByLength(items, num, true);
  // Runs of equal lengths are shuffled; the one in the middle belongs to the first half.
  int64_t middle = HalfStart(num, 1);
  while (middle > 0 && middle < num && items[middle].length == items[middle - 1].length) ++middle;
  InHalves(num, [&](int half) {
    const int64_t end = half == 0 ? middle : num;
    int64_t first = half == 0 ? 0 : middle;
    while (first < end) {
      int64_t run_end = first + 1;
      while (run_end < end && items[run_end].length == items[first].length) ++run_end;
      Random random(Mix(seed) + static_cast<uint64_t>(items[first].length));
      Shuffle(items + first, run_end - first, &random);
      first = run_end;
    }
  });
}

#define HBP_INSTANTIATE(Id)                                                                   \
  template LevelItems<Id> ShuffledByLevel(const int32_t*, const Id*, int64_t, const int64_t*, \
                                          int64_t, uint64_t);                                 \
  template LevelItems<Id> ShuffledByLevel(const int64_t*, const Id*, int64_t, const int64_t*, \
                                          int64_t, uint64_t);                                 \
  template void SortByLength(Item<Id>*, int64_t, bool);                                       \
  template void SortDescending(Item<Id>*, int64_t, uint64_t);
HBP_INSTANTIATE(int32_t)
HBP_INSTANTIATE(int64_t)
#undef HBP_INSTANTIATE

}  // namespace hbp
