// An array that is not filled when it is made. A large one asks the kernel for huge pages: packing
// touches memory at random, and fresh memory in small pages costs more than the packing itself.

#ifndef HBP_BUFFER_H_
#define HBP_BUFFER_H_

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>

// Address sanitizer watches memory of malloc only.
#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__)
#define HBP_HUGE_PAGES
#include <sys/mman.h>
#endif

namespace hbp {

// Bytes of memory, in huge pages where there are enough of them.
class Memory {
 public:
  Memory() = default;
  explicit Memory(size_t bytes) {
#ifdef HBP_HUGE_PAGES
    constexpr size_t kHugePage = size_t{1} << 21;
    if (bytes >= kHugePage / 2) {
      mapped_ = (bytes + kHugePage - 1) / kHugePage * kHugePage;
      void* mapped = mmap(nullptr, mapped_ + kHugePage, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (mapped == MAP_FAILED) throw std::bad_alloc();
      // Give back what is before and after the huge pages.
      char* first = static_cast<char*>(mapped);
      const size_t before =
          (kHugePage - reinterpret_cast<uintptr_t>(first) % kHugePage) % kHugePage;
      if (before > 0) munmap(first, before);
      data_ = first + before;
      munmap(first + before + mapped_, kHugePage - before);
      madvise(data_, mapped_, MADV_HUGEPAGE);
      return;
    }
#endif
    data_ = std::malloc(bytes > 0 ? bytes : 1);
    if (data_ == nullptr) throw std::bad_alloc();
  }
  Memory(Memory&& other) noexcept { *this = std::move(other); }
  Memory& operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(mapped_, other.mapped_);
    return *this;
  }
  ~Memory() {
#ifdef HBP_HUGE_PAGES
    if (mapped_ > 0) {
      munmap(data_, mapped_);
      return;
    }
#endif
    std::free(data_);
  }

  void* get() const { return data_; }

 private:
  void* data_ = nullptr;
  size_t mapped_ = 0;  // bytes, 0 for memory of malloc
};

template <typename T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t size)
      : memory_(BytesOf(size)), data_(static_cast<T*>(memory_.get())), size_(size) {}
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    memory_ = std::move(other.memory_);
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
    return *this;
  }

  int64_t size() const { return size_; }
  T* data() { return data_; }
  const T* data() const { return data_; }
  T& operator[](int64_t index) { return data_[index]; }
  const T& operator[](int64_t index) const { return data_[index]; }
  T* begin() { return data_; }
  T* end() { return data_ + size_; }
  const T* begin() const { return data_; }
  const T* end() const { return data_ + size_; }

 private:
  static size_t BytesOf(int64_t size) {
    constexpr int64_t kMost = (int64_t{1} << 47) / static_cast<int64_t>(sizeof(T));
    if (size < 0 || size > kMost) throw std::bad_alloc();
    return static_cast<size_t>(size) * sizeof(T);
  }

  Memory memory_;
  T* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace hbp

#endif  // HBP_BUFFER_H_
