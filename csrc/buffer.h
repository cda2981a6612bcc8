// An array that is not filled when it is made; large ones ask the kernel for huge pages, because
// packing touches memory at random.

#ifndef HBP_BUFFER_H_
#define HBP_BUFFER_H_

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace hbp {

template <typename T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t size) : size_(size) {
    constexpr size_t kHuge = size_t{1} << 21;
    size_t bytes = static_cast<size_t>(size) * sizeof(T);
    if (bytes < 8 * kHuge) {
      data_.reset(static_cast<T*>(std::malloc(bytes > 0 ? bytes : 1)));
    } else {
      bytes = (bytes + kHuge - 1) / kHuge * kHuge;
      data_.reset(static_cast<T*>(std::aligned_alloc(kHuge, bytes)));
#ifdef __linux__
      if (data_) madvise(data_.get(), bytes, MADV_HUGEPAGE);
#endif
    }
    if (!data_) throw std::bad_alloc();
  }

  int64_t size() const { return size_; }
  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }
  T& operator[](int64_t index) { return data_[index]; }
  const T& operator[](int64_t index) const { return data_[index]; }
  T* begin() { return data_.get(); }
  T* end() { return data_.get() + size_; }
  const T* begin() const { return data_.get(); }
  const T* end() const { return data_.get() + size_; }
  T* release() { return data_.release(); }  // to be freed with std::free

 private:
  struct Free {
    void operator()(T* pointer) const { std::free(pointer); }
  };
  std::unique_ptr<T[], Free> data_;
  int64_t size_ = 0;
};

}  // namespace hbp

#endif  // HBP_BUFFER_H_
