// Bytes turned into inputs for the kernels, and what every check ends in.

#ifndef HBP_TESTS_FUZZ_INPUT_H_
#define HBP_TESTS_FUZZ_INPUT_H_

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "item.h"
#include "packing.h"
#include "parallel.h"
#include "random.h"

namespace hbp::fuzz {

inline void Check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "violated: %s\n", what);
  std::abort();
}

// Decisions read from bytes; zeros when they are used up.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), left_(size) {}

  // A number low .. high.
  int64_t Pick(int64_t low, int64_t high) {
    const uint64_t range = static_cast<uint64_t>(high) - static_cast<uint64_t>(low) + 1;
    uint64_t word = 0;
    const size_t taken = std::min<size_t>(left_, range <= 256 ? 1 : 8);
    if (taken > 0) std::memcpy(&word, data_, taken);
    data_ += taken;
    left_ -= taken;
    return low + static_cast<int64_t>(range == 0 ? word : word % range);
  }

  bool Flip() { return Pick(0, 1) == 1; }

  uint64_t Seed() { return static_cast<uint64_t>(Pick(INT64_MIN, INT64_MAX)); }

  // One of the numbers, or a neighbour of it.
  int64_t Near(const std::vector<int64_t>& numbers) {
    return numbers[Pick(0, static_cast<int64_t>(numbers.size()) - 1)] + Pick(-1, 1);
  }

 private:
  const uint8_t* data_;
  size_t left_;
};

// How many items, and the packs for them. longest: what a pack holds in whole multiples.
struct Shape {
  explicit Shape(Input* input) {
    const int64_t kind = input->Pick(0, 255);
    num = kind < 200   ? input->Pick(0, 100)
          : kind < 250 ? input->Pick(0, 1000)
          : kind < 254 ? input->Near({4096, 8192})
                       : input->Near({kFewItems, kManyItems, kManyItems + 33});
    capacity = input->Flip() ? input->Pick(1, 300)
                             : input->Near({2, 64, 4096, int64_t{1} << 17, int64_t{1} << 18,
                                            int64_t{1} << 24, INT32_MAX - int64_t{1}});
    multiple = input->Pick(0, 2) > 0 ? 1 : input->Pick(1, std::min<int64_t>(capacity, 200));
    longest = capacity / multiple * multiple;
  }

  int64_t num, capacity, multiple, longest;
};

// Items 0 .. num - 1 that fit, of many kinds: few or many different lengths, most of them short.
template <typename Id>
std::vector<Item<Id>> PickItems(Input* input, const Shape& shape) {
  const int64_t most = input->Flip() ? shape.longest : input->Pick(1, shape.longest);
  const int64_t least = input->Pick(0, 3) > 0 ? 1 : input->Pick(1, most);
  const bool is_skewed = input->Flip();
  Random random(input->Seed());
  std::vector<Item<Id>> items;
  for (int64_t i = 0; i < shape.num; ++i) {
    int64_t range = most - least + 1;
    if (is_skewed) range = std::max<int64_t>(range >> random.Below(31), 1);
    const int64_t length = i < 16 ? input->Pick(least, most) : least + random.Below(range);
    items.push_back({static_cast<Id>(i), static_cast<int32_t>(length)});
  }
  return items;
}

// Items in an order that does not depend on how they are arranged.
template <typename Iterator>
auto Sorted(Iterator first, Iterator end) {
  std::vector<std::pair<int64_t, int64_t>> pairs;
  for (; first != end; ++first) pairs.emplace_back(first->id, first->length);
  std::sort(pairs.begin(), pairs.end());
  return pairs;
}

// The targets: each runs kernels on one input and checks what must hold of any answer.
void FuzzPacking(Input* input);
void FuzzFilling(Input* input);
void FuzzOrder(Input* input);
void FuzzBalance(Input* input);
void FuzzSteps(Input* input);

}  // namespace hbp::fuzz

#endif  // HBP_TESTS_FUZZ_INPUT_H_
