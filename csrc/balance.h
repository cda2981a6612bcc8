// Packs as wholes: their sums, splitting them, sharing their costs out over ranks.
// Every kernel equals tests/reference.py exactly.

#ifndef HBP_BALANCE_H_
#define HBP_BALANCE_H_

#include <cstdint>
#include <vector>

#include "buffer.h"
#include "item.h"

namespace hbp {

// sequences, tokens and the sum of squared lengths of a pack.
struct PackSum {
  int64_t count;
  int64_t tokens;
  int64_t squares;
};

// The sums of packs 0 .. num_packs - 1. pack_of[i] is the pack of item i.
template <typename Id>
Buffer<PackSum> SumPacks(const Item<Id>* items, const Id* pack_of, int64_t num, int64_t num_packs);

// Spreads the sequences of `chosen` packs, of one capacity, over these and `num_new` new packs,
// which are numbered from num_packs on: from the longest sequence to the shortest, ties by place,
// each goes to the pack with least, ties by place in (chosen, new). Should that fill a pack over
// its capacity, then chosen[k] alone is spread over itself and new pack k instead, for every k that
// there are both of. Where every chosen pack has two sequences or more, new packs that get nothing
// are the last ones. Lengths are rounded up to `multiple`. Returns the sums of the chosen packs,
// then those of the new ones.
template <typename Id>
Buffer<PackSum> SpreadPacks(const Item<Id>* items, Id* pack_of, int64_t num, int64_t capacity,
                            int64_t multiple, const int64_t* chosen, int64_t num_chosen,
                            int64_t num_new, int64_t num_packs);

// Tokens by group of packs and class of sequence, int64 [num_groups, num_bins + 1 + num_sources]:
// first by length (class k holds lengths up to bins[k], the last one all others), then by source.
// group_of: by pack. bins: ascending. source_of: by sequence id, 0 .. num_sources - 1, or null.
template <typename Id>
Buffer<int64_t> ClassTokens(const Item<Id>* items, const Id* pack_of, int64_t num,
                            const int32_t* group_of, int64_t num_groups, const int64_t* bins,
                            int64_t num_bins, const int32_t* source_of, int64_t num_sources);

// The order of packs over replicas that evens out what ranks have to do in a step. In every
// micro-batch the costliest pack (ties by place) goes to the replica whose busiest rank has least
// to do so far in the step (ties by place), the next one to the next.
//
// costs: cost per rank of each pack. starts: num_microbatches + 1, the first pack of each
// micro-batch; per_step of them are a step. Returns the packs in their new order.
Buffer<int64_t> ReplicaOrder(const double* costs, const int64_t* starts, int64_t num_microbatches,
                             int64_t per_step, int64_t num_ranks);

}  // namespace hbp

#endif  // HBP_BALANCE_H_
