// Filling packs of the longer levels: almost exactly, so that no short sequence pays for context
// parallelism without need. Every kernel equals tests/reference.py exactly.

#ifndef HBP_FILLING_H_
#define HBP_FILLING_H_

#include <cstdint>

#include "item.h"
#include "packing.h"

namespace hbp {

// Packs a level's own sequences with a look-ahead. A pack starts with the longest sequence while
// that takes more than half of it, later with one at random. While more than two more are needed
// one is drawn at random among those that leave a sum the others can reach; the last two are the
// best of kPairs pairs: one at random and the longest that still fits beside it. "At random" draws
// a place in the ascending order of lengths up to kDraws times, until the sequence there is in no
// pack; after the last draw the next one above it is taken. Arguments and exceptions as in
// packing.h.
template <typename Id>
Id LookAhead(const Item<Id>* items, int64_t num, int64_t capacity, int64_t multiple, uint64_t seed,
             Id* pack_of);
constexpr int kPairs = 8;
constexpr int kDraws = 8;

// GreedyFill (paper section 3, Algorithm 6): fills packs, one after another, from the front of
// `items`. What is at the front goes in while it fits; then, as long as one fits, the longest that
// fits among the next kWindow items, which changes places with the one at the front. Items that fit
// nowhere gather in the window: where none of it fits a pack that has room for an item of mean
// length, it changes places with the last kWindow items that were not put aside so before, once for
// each pack; when fewer than two windows are left of those, all count as not put aside again.
//
// spaces: free tokens of num_packs packs, updated. Item i's pack, first_pack + its index, is
// written to pack_of[i]. Returns how many items, all at the front, were taken.
template <typename Id>
int64_t GreedyFill(Item<Id>* items, int64_t num, int64_t multiple, int64_t* spaces,
                   int64_t num_packs, Id first_pack, Id* pack_of);
constexpr int64_t kWindow = 256;

}  // namespace hbp

#endif  // HBP_FILLING_H_
