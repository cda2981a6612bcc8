// A set of integers 0 .. size - 1 that finds the nearest member at or above, or at or below, a
// number: a bit per integer, and above every 64 bits one bit that says whether any of them is set.

#ifndef HBP_SUCCESSOR_SET_H_
#define HBP_SUCCESSOR_SET_H_

#include <array>
#include <cstdint>
#include <vector>

namespace hbp {

// kLayers layers hold 64^kLayers integers.
template <int kLayers>
class SuccessorSet {
 public:
  static constexpr int64_t kMostMembers = int64_t{1} << (6 * kLayers);

  explicit SuccessorSet(int64_t size) {
    int64_t num_words = 0;
    for (int depth = 0; depth < kLayers; ++depth) {
      size = (size + 63) / 64;
      starts_[depth] = num_words;
      num_words += size + 1;  // a word more, always empty: Next may look one past the end
    }
    words_.assign(num_words, 0);
  }

  // Makes 0 .. num - 1 members.
  void InsertUpTo(int64_t num) {
    for (int depth = 0; depth < kLayers && num > 0; ++depth) {
      for (int64_t word = 0; word < num / 64; ++word) Word(depth, word) = ~uint64_t{0};
      if (num % 64 > 0) Word(depth, num / 64) |= (uint64_t{1} << (num % 64)) - 1;
      num = (num + 63) / 64;
    }
  }

  void Insert(int64_t member) {
    for (int depth = 0; depth < kLayers; ++depth) {
      Word(depth, member >> 6) |= uint64_t{1} << (member & 63);
      member >>= 6;
    }
  }

  void Erase(int64_t member) {
    for (int depth = 0; depth < kLayers; ++depth) {
      if ((Word(depth, member >> 6) &= ~(uint64_t{1} << (member & 63))) != 0) return;
      member >>= 6;
    }
  }

  // The smallest member >= from, or -1. from is at most the size.
  int64_t Next(int64_t from) const { return NextAt<0>(from); }

  // The largest member <= from, or -1. from is below the size.
  int64_t Previous(int64_t from) const {
    for (int depth = 0; depth < kLayers && from >= 0; ++depth) {
      const uint64_t behind = Word(depth, from >> 6) & (~uint64_t{0} >> (63 - (from & 63)));
      if (behind != 0) {
        int64_t member = (from >> 6 << 6) + 63 - __builtin_clzll(behind);
        while (depth > 0) {
          --depth;
          member = (member << 6) + 63 - __builtin_clzll(Word(depth, member));
        }
        return member;
      }
      from = (from >> 6) - 1;
    }
    return -1;
  }

 private:
  uint64_t& Word(int depth, int64_t index) { return words_[starts_[depth] + index]; }
  const uint64_t& Word(int depth, int64_t index) const { return words_[starts_[depth] + index]; }

  template <int kDepth>
  int64_t NextAt(int64_t from) const {
    if constexpr (kDepth == kLayers) {
      return -1;
    } else {
      const int64_t word = from >> 6;
      const uint64_t ahead = Word(kDepth, word) & (~uint64_t{0} << (from & 63));
      if (ahead != 0) return (word << 6) + __builtin_ctzll(ahead);
      const int64_t later = NextAt<kDepth + 1>(word + 1);
      return later < 0 ? -1 : (later << 6) + __builtin_ctzll(Word(kDepth, later));
    }
  }

  std::array<int64_t, kLayers> starts_;
  std::vector<uint64_t> words_;
};

// The same for up to 2^18 integers, upwards only: three layers, the top one a single word of
// which nearly all bits are used, so that a search that does not end in its own word goes to the
// top, which a processor can predict.
class CompactSet {
 public:
  static constexpr int64_t kMostMembers = int64_t{1} << 18;  // 64 blocks of 64 words

  explicit CompactSet(int64_t size) : words_((size >> 6) + 2, 0) {
    while (((size - 1) >> (12 + shift_)) > 0) ++shift_;
  }

  void Insert(int64_t member) {
    const int64_t word = member >> 6;
    words_[word] |= uint64_t{1} << (member & 63);
    blocks_[word >> shift_] |= uint64_t{1} << (word & ((1 << shift_) - 1));
    top_ |= uint64_t{1} << (word >> shift_);
  }

  void Erase(int64_t member) {
    const int64_t word = member >> 6;
    const int64_t block = word >> shift_;
    if ((words_[word] &= ~(uint64_t{1} << (member & 63))) != 0) return;
    if ((blocks_[block] &= ~(uint64_t{1} << (word & ((1 << shift_) - 1)))) != 0) return;
    top_ &= ~(uint64_t{1} << block);
  }

  // The smallest member >= from, or -1. from is below the size.
  int64_t Next(int64_t from) const {
    int64_t word = from >> 6;
    const uint64_t ahead = words_[word] & (~uint64_t{0} << (from & 63));
    if (ahead != 0) return (word << 6) + __builtin_ctzll(ahead);
    int64_t block = word >> shift_;
    uint64_t later = blocks_[block] & (~uint64_t{0} << (word & ((1 << shift_) - 1)) << 1);
    if (later == 0) {
      const uint64_t blocks = top_ & (~uint64_t{0} << block << 1);
      if (blocks == 0) return -1;
      block = __builtin_ctzll(blocks);
      later = blocks_[block];
    }
    word = (block << shift_) + __builtin_ctzll(later);
    return (word << 6) + __builtin_ctzll(words_[word]);
  }

 private:
  int shift_ = 0;  // a block is 2^shift_ words
  uint64_t top_ = 0;
  std::array<uint64_t, 64> blocks_{};
  std::vector<uint64_t> words_;
};

}  // namespace hbp

#endif  // HBP_SUCCESSOR_SET_H_
