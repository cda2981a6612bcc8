// The order in which sequences are visited: at random, or by length.

#ifndef HBP_ORDER_H_
#define HBP_ORDER_H_

#include <cstdint>
#include <vector>

#include "buffer.h"
#include "item.h"

namespace hbp {

template <typename Id>
struct LevelItems {
  Buffer<Item<Id>> items;       // those of the longest level first
  std::vector<int64_t> starts;  // num_levels + 1: level num_levels - 1 - k is at starts[k] ..
};

// Sorts sequences into levels, each in random order. A sequence belongs to the first level whose
// limit is at least its length; one of length 0 is left out. O(num) time, memory read in order.
//
// lengths: tokens of each sequence. chosen: `num` ids to take, repeats allowed, or null for
// 0 .. num - 1. limits: ascending. Throws std::invalid_argument for a length below 0 or over the
// last limit.
//
// The order is a uniform shuffle in two rounds: every sequence goes to a random bucket, then each
// bucket, small enough for the cache, is shuffled (after Rao, "Generation of random permutations of
// given number of elements using random sampling numbers", 1961). Place i of the input takes 16
// bits of the random word i / 4.
template <typename Length, typename Id>
LevelItems<Id> ShuffledByLevel(const Length* lengths, const Id* chosen, int64_t num,
                               const int64_t* limits, int64_t num_levels, uint64_t seed);

// Sorts items by falling length; equal ones are in random order, which their length seeds.
template <typename Id>
void SortDescending(Item<Id>* items, int64_t num, uint64_t seed);

// Sorts items by length; equal ones keep their order. O(num) time.
template <typename Id>
void SortByLength(Item<Id>* items, int64_t num, bool descending);

}  // namespace hbp

#endif  // HBP_ORDER_H_
