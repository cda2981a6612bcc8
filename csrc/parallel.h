// Two halves of a job on two threads. What is computed never depends on it: a half is a fixed part.

#ifndef HBP_PARALLEL_H_
#define HBP_PARALLEL_H_

#include <cstdint>
#include <exception>
#include <thread>

namespace hbp {

constexpr int kHalves = 2;
// Below this many items a thread costs more than it saves.
constexpr int64_t kFewItems = int64_t{1} << 15;

// Calls work(0) and work(1), at the same time when there are enough items. Rethrows an exception.
template <typename Work>
void InHalves(int64_t num, const Work& work) {
  if (num < kFewItems) {
    work(0);
    work(1);
    return;
  }
  std::exception_ptr failure;
  std::thread other([&] {
    try {
      work(1);
    } catch (...) {
      failure = std::current_exception();
    }
  });
  try {
    work(0);
  } catch (...) {
    other.join();
    throw;
  }
  other.join();
  if (failure) std::rethrow_exception(failure);
}

// Where half `half` of `num` items starts; half kHalves is the end. A multiple of 4.
inline int64_t HalfStart(int64_t num, int half) {
  return half == 0 ? 0 : half == 1 ? num / 2 / 4 * 4 : num;
}

}  // namespace hbp

#endif  // HBP_PARALLEL_H_
