// Packing of sequences into packs of one capacity: which sequences share a pack.
//
// Every kernel visits items in the order given and is a pure function of its arguments.
// tests/reference.py holds the slow and obvious versions that give exactly the same answer.
// The pack of item i is written to pack_of[i]; packs are numbered 0, 1, ... as they are opened, and
// the kernels return how many there are. capacity is 1 .. 2^31 - 1 tokens; every item takes 1 ..
// capacity tokens once it is rounded up to a multiple of `multiple`, else std::invalid_argument is
// thrown.

#ifndef HBP_PACKING_H_
#define HBP_PACKING_H_

#include <cstdint>
#include <vector>

#include "buffer.h"
#include "item.h"

namespace hbp {

// Puts each item into the fullest pack that still holds it; of several equally full packs into the
// one that changed last. Items of equal length that follow each other are placed in runs, which
// makes the decreasing order fast. O(num + capacity) time; O(num log num) when capacity is far
// above num.
//
// in_streams: from kManyItems items on, two streams, each 31/64 of the items, are packed apart (on
// two threads); the rest then goes into the packs of both, which count as changed in the order of
// their numbers. Only for items in random order, where it costs no more than a pack or two.
template <typename Id>
Id BestFit(const Item<Id>* items, int64_t num, int64_t capacity, int64_t multiple, bool in_streams,
           Id* pack_of);
constexpr int64_t kManyItems = int64_t{1} << 16;

// Puts each item into the pack that was opened first among those that still hold it. Runs as above.
// O(num log num) time.
template <typename Id>
Id FirstFit(const Item<Id>* items, int64_t num, int64_t capacity, int64_t multiple, Id* pack_of);

// Puts each item into the last pack, or opens a new one when it does not fit. O(num) time.
template <typename Id>
Id NextFit(const Item<Id>* items, int64_t num, int64_t capacity, int64_t multiple, Id* pack_of);

// Iterative sampling and filtering (ISF, paper section 3): next-fit, packs with at least
// `threshold` tokens are kept, the rest is shuffled and packed again, `iterations` times in all;
// what the last time leaves under the threshold is kept too. Reorders `items`, so that packs are
// contiguous; those that were accepted come first.
template <typename Id>
Id IterativeSampling(Item<Id>* items, int64_t num, int64_t capacity, int64_t multiple,
                     int64_t threshold, int64_t iterations, uint64_t seed, Id* pack_of);

// Ids by pack: pack p's are written from starts[p] on, in the order of the items. Throws
// std::invalid_argument when a pack would reach below 0 or beyond num.
template <typename Id>
Buffer<Id> Gather(const Item<Id>* items, const Id* pack_of, int64_t num, const int64_t* starts,
                  int64_t num_packs);

// The same with packs in the order of their numbers: pack p's ids are offsets[p] .. offsets[p + 1].
template <typename Id>
Buffer<Id> Group(const Item<Id>* items, const Id* pack_of, int64_t num, int64_t num_packs,
                 std::vector<int64_t>* offsets);

}  // namespace hbp

#endif  // HBP_PACKING_H_
