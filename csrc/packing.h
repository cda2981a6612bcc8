// Packing of sequences into packs of one capacity: which sequences share a pack.
//
// Every kernel visits the sequences in a given order and is a pure function of its arguments.
// tests/reference.py holds the slow and obvious versions that give exactly the same answer.

#ifndef HBP_PACKING_H_
#define HBP_PACKING_H_

#include <cstdint>
#include <vector>

namespace hbp {

// Pack p holds the sequences sequences[offsets[p]] .. sequences[offsets[p + 1] - 1], in the order
// in which they were visited. Packs are in the order in which they were opened.
struct Packs {
  std::vector<int64_t> sequences;
  std::vector<int64_t> offsets;
};

// Puts each sequence into the fullest pack that still holds it; of several equally full packs into
// the one that changed last. O(num + capacity) time, capacity / 8 + 8 x (capacity + 3 x num) bytes.
//
// seq_lens: num lengths in 1 .. capacity. visit: a permutation of 0 .. num - 1.
// Throws std::invalid_argument when a length or an entry of visit is out of range.
template <typename Length>
Packs BestFit(const Length* seq_lens, const int64_t* visit, int64_t num, int64_t capacity);

// Puts each sequence into the pack that was opened first among those that still hold it.
// O(num log num) time. Arguments and exceptions as for BestFit.
template <typename Length>
Packs FirstFit(const Length* seq_lens, const int64_t* visit, int64_t num, int64_t capacity);

}  // namespace hbp

#endif  // HBP_PACKING_H_
