#include "packing.h"

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <string>

namespace hbp {
namespace {

// A set of integers 0 .. size - 1 that finds the smallest member at or above a number: a bit per
// integer, and above every 64 bits one bit that says whether any of them is set.
class SuccessorSet {
 public:
  explicit SuccessorSet(int64_t size) {
    do {
      size = (size + 63) / 64;
      layers_.emplace_back(static_cast<size_t>(size), 0);
    } while (size > 1);
  }

  void Insert(int64_t member) {
    for (auto& layer : layers_) {
      layer[member >> 6] |= uint64_t{1} << (member & 63);
      member >>= 6;
    }
  }

  void Erase(int64_t member) {
    for (auto& layer : layers_) {
      if ((layer[member >> 6] &= ~(uint64_t{1} << (member & 63))) != 0) return;
      member >>= 6;
    }
  }

  // The smallest member >= from, or -1.
  int64_t Next(int64_t from) const {
    for (size_t depth = 0; depth < layers_.size(); ++depth) {
      const auto& layer = layers_[depth];
      const int64_t word = from >> 6;
      if (word >= static_cast<int64_t>(layer.size())) return -1;
      const uint64_t ahead = layer[word] & (~uint64_t{0} << (from & 63));
      if (ahead != 0) return Descend(depth, (word << 6) + __builtin_ctzll(ahead));
      from = word + 1;
    }
    return -1;
  }

 private:
  int64_t Descend(size_t depth, int64_t member) const {
    while (depth > 0) {
      --depth;
      member = (member << 6) + __builtin_ctzll(layers_[depth][member]);
    }
    return member;
  }

  std::vector<std::vector<uint64_t>> layers_;
};

// The length of the sequence visited at a position; throws when it cannot be packed.
template <typename Length>
int64_t VisitedLength(const Length* seq_lens, int64_t sequence, int64_t num, int64_t capacity) {
  if (sequence < 0 || sequence >= num) {
    throw std::invalid_argument("visit holds " + std::to_string(sequence) +
                                ", which is no index of seq_lens");
  }
  const int64_t length = seq_lens[sequence];
  if (length < 1 || length > capacity) {
    throw std::invalid_argument("sequence " + std::to_string(sequence) + " has " +
                                std::to_string(length) + " tokens; it must be 1 to " +
                                std::to_string(capacity));
  }
  return length;
}

// Turns "pack of each visited sequence" into Packs by a counting sort.
Packs Gather(const std::vector<int64_t>& pack_of, const int64_t* visit, int64_t num_packs) {
  Packs packs;
  packs.offsets.assign(static_cast<size_t>(num_packs) + 1, 0);
  for (const int64_t pack : pack_of) ++packs.offsets[pack + 1];
  for (int64_t pack = 0; pack < num_packs; ++pack) {
    packs.offsets[pack + 1] += packs.offsets[pack];
  }
  std::vector<int64_t> next(packs.offsets.begin(), packs.offsets.end() - 1);
  packs.sequences.resize(pack_of.size());
  for (size_t position = 0; position < pack_of.size(); ++position) {
    packs.sequences[next[pack_of[position]]++] = visit[position];
  }
  return packs;
}

}  // namespace

template <typename Length>
Packs BestFit(const Length* seq_lens, const int64_t* visit, int64_t num, int64_t capacity) {
  constexpr int64_t kNone = -1;
  SuccessorSet spaces(capacity + 1);                 // free tokens of packs that have room
  std::vector<int64_t> newest(capacity + 1, kNone);  // by free tokens: the pack that came last
  std::vector<int64_t> older;                        // by pack: the one that came before it
  std::vector<int64_t> pack_of(static_cast<size_t>(num));
  for (int64_t position = 0; position < num; ++position) {
    const int64_t length = VisitedLength(seq_lens, visit[position], num, capacity);
    int64_t space = spaces.Next(length);
    int64_t pack;
    if (space < 0) {
      space = capacity;
      pack = static_cast<int64_t>(older.size());
      older.push_back(kNone);
    } else {
      pack = newest[space];
      newest[space] = older[pack];
      if (newest[space] == kNone) spaces.Erase(space);
    }
    pack_of[position] = pack;
    space -= length;
    if (space > 0) {
      if (newest[space] == kNone) spaces.Insert(space);
      older[pack] = newest[space];
      newest[space] = pack;
    }
  }
  return Gather(pack_of, visit, static_cast<int64_t>(older.size()));
}

template <typename Length>
Packs FirstFit(const Length* seq_lens, const int64_t* visit, int64_t num, int64_t capacity) {
  int64_t leaves = 1;
  while (leaves < num) leaves *= 2;
  // A tournament tree over the free tokens of num packs, all empty: node i has children 2i, 2i + 1.
  std::vector<int64_t> space(static_cast<size_t>(2 * leaves), capacity);
  std::vector<int64_t> pack_of(static_cast<size_t>(num));
  int64_t num_packs = 0;
  for (int64_t position = 0; position < num; ++position) {
    const int64_t length = VisitedLength(seq_lens, visit[position], num, capacity);
    int64_t node = 1;
    while (node < leaves) {
      node *= 2;
      if (space[node] < length) ++node;
    }
    pack_of[position] = node - leaves;
    num_packs = std::max(num_packs, node - leaves + 1);
    space[node] -= length;
    for (node /= 2; node >= 1; node /= 2) {
      space[node] = std::max(space[2 * node], space[2 * node + 1]);
    }
  }
  return Gather(pack_of, visit, num_packs);
}

template Packs BestFit<int32_t>(const int32_t*, const int64_t*, int64_t, int64_t);
template Packs BestFit<int64_t>(const int64_t*, const int64_t*, int64_t, int64_t);
template Packs FirstFit<int32_t>(const int32_t*, const int64_t*, int64_t, int64_t);
template Packs FirstFit<int64_t>(const int64_t*, const int64_t*, int64_t, int64_t);

}  // namespace hbp
