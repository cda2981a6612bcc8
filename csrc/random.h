// The only source of randomness in a plan: splitmix64 (Steele, Lea, Flood: "Fast splittable
// pseudorandom number generators", 2014), the same numbers on every machine.

#ifndef HBP_RANDOM_H_
#define HBP_RANDOM_H_

#include <cstdint>
#include <utility>

namespace hbp {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;

// The output of splitmix64 at `state`.
inline uint64_t Mix(uint64_t state) {
  state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9;
  state = (state ^ (state >> 27)) * 0x94D049BB133111EB;
  return state ^ (state >> 31);
}

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t Next() { return Mix(state_ += kGolden); }

  // A number below `bound`, 1 <= bound < 2^63. Its bias is below bound / 2^64.
  int64_t Below(int64_t bound) {
    return static_cast<int64_t>((static_cast<unsigned __int128>(Next()) * bound) >> 64);
  }

 private:
  uint64_t state_;
};

// From the last place to the second one, the item there changes places with one at or before it.
// Up to 2^32 items a random word serves two of them, its upper half first.
template <typename T>
void Shuffle(T* items, int64_t num, Random* random) {
  int64_t last = num - 1;
  for (; last >= int64_t{1} << 32; --last) std::swap(items[last], items[random->Below(last + 1)]);
  while (last > 0) {
    const uint64_t word = random->Next();
    std::swap(items[last], items[(word >> 32) * (last + 1) >> 32]);
    if (--last == 0) break;
    std::swap(items[last], items[(word & 0xffffffff) * (last + 1) >> 32]);
    --last;
  }
}

}  // namespace hbp

#endif  // HBP_RANDOM_H_
