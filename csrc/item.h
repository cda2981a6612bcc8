// A sequence on its way into a pack: its id and its length in tokens, side by side, so that a
// kernel that walks items reads memory in order.

#ifndef HBP_ITEM_H_
#define HBP_ITEM_H_

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "parallel.h"

namespace hbp {

// Id is int32_t for less than 2^31 sequences, else int64_t. Packs are numbered by the same type.
template <typename Id>
struct Item {
  Id id;
  int32_t length;
};

// What a sequence takes of a pack: its length rounded up to the level's multiple.
inline int64_t RoundUp(int64_t length, int64_t multiple) {
  return multiple == 1 ? length : (length + multiple - 1) / multiple * multiple;
}

[[noreturn]] inline void ThrowUnfit(int64_t id, int64_t charge, int64_t capacity) {
  throw std::invalid_argument("sequence " + std::to_string(id) + " takes " +
                              std::to_string(charge) + " tokens; it must be 1 to " +
                              std::to_string(capacity));
}

// What an item takes of a pack; throws when no pack can hold it.
template <typename Id>
inline int64_t Charge(const Item<Id>& item, int64_t capacity, int64_t multiple) {
  const int64_t charge = RoundUp(item.length, multiple);
  if (item.length < 1 || charge > capacity) ThrowUnfit(item.id, charge, capacity);
  return charge;
}

// Throws unless every item fits a pack.
template <typename Id>
void CheckCharges(const Item<Id>* items, int64_t num, int64_t capacity, int64_t multiple) {
  bool fits[kHalves];
  InHalves(num, [&](int half) {
    int32_t least = 1;
    int32_t most = 1;
    const int64_t end = HalfStart(num, half + 1);
    for (int64_t i = HalfStart(num, half); i < end; ++i) {
      least = std::min(least, items[i].length);
      most = std::max(most, items[i].length);
    }
    fits[half] = least >= 1 && most <= capacity / multiple * multiple;
  });
  if (fits[0] && fits[1]) return;
  for (int64_t i = 0; i < num; ++i) Charge(items[i], capacity, multiple);
}

}  // namespace hbp

#endif  // HBP_ITEM_H_
