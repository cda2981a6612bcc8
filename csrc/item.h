// A sequence on its way into a pack: its id and its length in tokens, side by side, so that a
// kernel that walks items reads memory in order.

#ifndef HBP_ITEM_H_
#define HBP_ITEM_H_

#include <cstdint>
#include <stdexcept>
#include <string>

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

// What an item takes of a pack; throws when no pack can hold it.
template <typename Id>
inline int64_t Charge(const Item<Id>& item, int64_t capacity, int64_t multiple) {
  const int64_t charge = RoundUp(item.length, multiple);
  if (item.length < 1 || charge > capacity) {
    throw std::invalid_argument("sequence " + std::to_string(item.id) + " takes " +
                                std::to_string(charge) + " tokens; it must be 1 to " +
                                std::to_string(capacity));
  }
  return charge;
}

}  // namespace hbp

#endif  // HBP_ITEM_H_
