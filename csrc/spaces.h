// Packs by their free tokens: the fullest pack with room for a length, the newest of equals.

#ifndef HBP_SPACES_H_
#define HBP_SPACES_H_

#include <cstdint>
#include <map>
#include <vector>

#include "buffer.h"
#include "successor_set.h"

namespace hbp {

// For capacities that fit a table: every operation takes constant time.
template <typename Id, typename Set>
class DenseSpaces {
 public:
  explicit DenseSpaces(int64_t capacity) : set_(capacity + 1), newest_(capacity + 1) {
    for (Id& pack : newest_) pack = -1;
  }

  // Removes and returns the newest of the fullest packs with at least `length` free tokens, and
  // tells how many it has; -1 when there is none.
  Id Take(int64_t length, int64_t* space) {
    *space = set_.Next(length);
    if (*space < 0) return -1;
    const Id pack = newest_[*space];
    newest_[*space] = older_[pack];
    if (older_[pack] < 0) set_.Erase(*space);
    return pack;
  }

  // Adds a pack that has `space` free tokens and is not there. New packs come in ascending order.
  void Put(Id pack, int64_t space) {
    if (pack >= static_cast<int64_t>(older_.size())) older_.resize(pack + 1);
    if (newest_[space] < 0) set_.Insert(space);
    older_[pack] = newest_[space];
    newest_[space] = pack;
  }

  // Calls visit(pack, space) for every pack.
  template <typename Visit>
  void ForEach(Visit visit) const {
    for (int64_t space = set_.Next(0); space >= 0; space = set_.Next(space + 1)) {
      for (Id pack = newest_[space]; pack >= 0; pack = older_[pack]) visit(pack, space);
    }
  }

 private:
  Set set_;
  Buffer<Id> newest_;      // by free tokens
  std::vector<Id> older_;  // by pack: the one that was put there before it
};

// For capacities far above the number of sequences: a tree of the free tokens that occur.
template <typename Id>
class SparseSpaces {
 public:
  explicit SparseSpaces(int64_t) {}

  Id Take(int64_t length, int64_t* space) {
    const auto found = packs_.lower_bound(length);
    if (found == packs_.end()) return -1;
    *space = found->first;
    const Id pack = found->second.back();
    found->second.pop_back();
    if (found->second.empty()) packs_.erase(found);
    return pack;
  }

  void Put(Id pack, int64_t space) { packs_[space].push_back(pack); }

  template <typename Visit>
  void ForEach(Visit visit) const {
    for (const auto& [space, packs] : packs_) {
      for (const Id pack : packs) visit(pack, space);
    }
  }

 private:
  std::map<int64_t, std::vector<Id>> packs_;
};

// Whether tables with an entry per token of `capacity` are worth it for `num` sequences.
inline bool IsDense(int64_t capacity, int64_t num) {
  return capacity <= (int64_t{1} << 17) || capacity / 4 <= num;
}

}  // namespace hbp

#endif  // HBP_SPACES_H_
