// The only file that includes pybind11: checks shapes and types, releases the GIL, hands results
// over without a copy.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "packing.h"

namespace py = pybind11;

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

// Gives a vector's memory to NumPy.
Array<int64_t> ToArray(std::vector<int64_t>&& values) {
  auto owned = std::make_unique<std::vector<int64_t>>(std::move(values));
  const auto size = static_cast<py::ssize_t>(owned->size());
  const int64_t* data = owned->data();
  py::capsule owner(owned.get(), [](void* p) { delete static_cast<std::vector<int64_t>*>(p); });
  owned.release();
  return Array<int64_t>(size, data, owner);
}

template <typename Length>
using Kernel = hbp::Packs (*)(const Length*, const int64_t*, int64_t, int64_t);

template <typename Length>
py::tuple Pack(Kernel<Length> kernel, const Array<Length>& seq_lens, const Array<int64_t>& visit,
               int64_t capacity) {
  if (seq_lens.ndim() != 1 || visit.ndim() != 1 || seq_lens.size() != visit.size()) {
    throw std::invalid_argument("seq_lens and visit must be one-dimensional and equally long");
  }
  if (capacity < 1) throw std::invalid_argument("capacity must be at least 1");
  hbp::Packs packs;
  {
    py::gil_scoped_release release;
    packs = kernel(seq_lens.data(), visit.data(), seq_lens.size(), capacity);
  }
  return py::make_tuple(ToArray(std::move(packs.sequences)), ToArray(std::move(packs.offsets)));
}

template <typename Length>
void Define(py::module_& module, const char* name, Kernel<Length> kernel, const char* doc) {
  module.def(
      name,
      [kernel](const Array<Length>& seq_lens, const Array<int64_t>& visit, int64_t capacity) {
        return Pack<Length>(kernel, seq_lens, visit, capacity);
      },
      py::arg("seq_lens").noconvert(), py::arg("visit").noconvert(), py::arg("capacity"), doc);
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "Kernels of megatron_hbp; the doors to them are packing.py and balance.py.";
  const char* best_fit = "Each sequence into the fullest pack that holds it: (order, offsets).";
  Define<int32_t>(module, "best_fit", hbp::BestFit<int32_t>, best_fit);
  Define<int64_t>(module, "best_fit", hbp::BestFit<int64_t>, best_fit);
  const char* first_fit = "Each sequence into the first pack that holds it: (order, offsets).";
  Define<int32_t>(module, "first_fit", hbp::FirstFit<int32_t>, first_fit);
  Define<int64_t>(module, "first_fit", hbp::FirstFit<int64_t>, first_fit);
}
