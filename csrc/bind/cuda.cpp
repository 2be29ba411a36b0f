// isthmus._cuda: addresses in device memory in, exceptions out. Everything public is validated in Python.
//
// An address of 0 stands for an array that is not given. A queue is the number of a device and one of its streams.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>

#include "../cuda/api.h"

namespace py = pybind11;
using namespace isthmus;

namespace {

using Address = std::uintptr_t;

template <class T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

cuda::Queue queue_of(const std::pair<int, Address>& queue) { return {queue.first, queue.second}; }

cuda::Rows rows(Address addresses, Address numel, Address first_block, Address row_of_block, std::int64_t count,
                std::int64_t blocks, std::int64_t block, int width, Dtype dtype, Dtype out_dtype) {
    return {at<const std::int64_t>(addresses),
            at<const std::int64_t>(numel),
            at<const std::int64_t>(first_block),
            at<const std::int32_t>(row_of_block),
            count,
            blocks,
            block,
            width,
            dtype,
            out_dtype};
}

cuda::Cuts cuts(const std::pair<Address, Address>& pair) {
    return {at<const double>(pair.first), at<const std::int64_t>(pair.second)};
}

cuda::Plan plan(bool based, Vote vote, MergeFunc merge, Address weights, Address divisors, Address scaling,
                Address rescale, const std::pair<Address, Address>& keep, const std::pair<Address, Address>& drop,
                Address lengths, Address first_group, Address keys, Address density, Address starts, bool inverse) {
    return {based,
            vote,
            merge,
            at<const double>(weights),
            at<const double>(divisors),
            at<const double>(scaling),
            at<const double>(rescale),
            cuts(keep),
            cuts(drop),
            at<const std::int64_t>(lengths),
            at<const std::int64_t>(first_group),
            {at<const std::int64_t>(keys), at<const double>(density), at<const std::int64_t>(starts), inverse}};
}

cuda::Sweep sweep(int zero, bool write, bool by_row, Address count, Address decide, Address mark, Address marked,
                  Address kept, Address counts) {
    return {zero,
            write,
            by_row,
            at<std::int64_t>(count),
            at<const std::int64_t>(decide),
            at<std::uint32_t>(mark),
            at<const std::uint32_t>(marked),
            at<std::int64_t>(kept),
            at<std::int64_t>(counts)};
}

// A ranking and its large groups in the memory of the host.
struct Selection : cuda::Ranking {
    std::vector<cuda::Large> groups_of;
};

Selection ranking(bool based, bool whole, bool exact, std::int64_t models, std::int64_t groups, std::int64_t ranks,
                  Address lengths, Address first_group, Address row_starts, Address k,
                  const std::vector<std::array<std::int64_t, 5>>& large, Address large_on_device,
                  const std::array<Address, 5>& result) {
    Selection s{{based, whole, exact, models, groups, ranks, at<const std::int64_t>(lengths),
                 at<const std::int64_t>(first_group), at<const std::int64_t>(row_starts), at<const std::int64_t>(k),
                 static_cast<std::int64_t>(large.size()), at<const cuda::Large>(large_on_device), at<double>(result[0]),
                 at<std::int64_t>(result[1]), at<std::int64_t>(result[2]), at<std::int64_t>(result[3]),
                 at<std::int64_t>(result[4])},
                {}};
    for (const auto& [group, first_block, blocks, elements, before] : large)
        s.groups_of.push_back({group, first_block, blocks, elements, before});
    return s;
}

cuda::Stack stack(std::int64_t problems, std::int64_t rows, std::int64_t cols, Address matrices, Dtype dtype,
                  bool maximize, Address starts, Address columns, Address u, Address v, Address primal, Address dual,
                  Address faults) {
    return {problems,
            rows,
            cols,
            at<const void>(matrices),
            dtype,
            maximize,
            at<const double>(starts),
            at<std::int64_t>(columns),
            at<double>(u),
            at<double>(v),
            at<double>(primal),
            at<double>(dual),
            at<std::int64_t>(faults)};
}

using QueuePair = std::pair<int, Address>;
using NoGil = py::call_guard<py::gil_scoped_release>;

}  // namespace

PYBIND11_MODULE(_cuda, m) {
    m.doc() = "Kernels of isthmus for CUDA devices.";
    // Types are local to the module: isthmus._cpu has some of the same.
    py::register_local_exception<cuda::LaunchError>(m, "LaunchError", PyExc_RuntimeError);

    py::enum_<Dtype>(m, "Dtype", py::module_local())
        .value("f64", Dtype::f64)
        .value("f32", Dtype::f32)
        .value("bf16", Dtype::bf16)
        .value("f16", Dtype::f16);
    py::enum_<Vote>(m, "Vote", py::module_local())
        .value("none", Vote::none)
        .value("total", Vote::total)
        .value("weighted_total", Vote::weighted_total)
        .value("frequency", Vote::frequency);
    py::enum_<MergeFunc>(m, "MergeFunc", py::module_local())
        .value("sum", MergeFunc::sum)
        .value("mean", MergeFunc::mean)
        .value("max", MergeFunc::max);

    m.def("architectures", &cuda::architectures);
    m.def("device_count", &cuda::device_count);

    py::class_<cuda::Rows>(m, "Rows", py::module_local())
        .def(py::init(&rows), py::kw_only(), py::arg("addresses"), py::arg("numel"), py::arg("first_block"),
             py::arg("row_of_block"), py::arg("rows"), py::arg("blocks"), py::arg("block"), py::arg("width"),
             py::arg("dtype"), py::arg("out_dtype"));
    m.def(
        "lerp",
        [](const cuda::Rows& rows, Address weights, bool per_row, const QueuePair& queue) {
            cuda::lerp(rows, at<const double>(weights), per_row, queue_of(queue));
        },
        py::arg("rows"), py::arg("weights"), py::arg("per_row"), py::arg("queue"), NoGil());
    m.def(
        "weighted_sum",
        [](const cuda::Rows& rows, Address weights, bool per_row, const QueuePair& queue) {
            cuda::weighted_sum(rows, at<const double>(weights), per_row, queue_of(queue));
        },
        py::arg("rows"), py::arg("weights"), py::arg("per_row"), py::arg("queue"), NoGil());

    py::class_<cuda::Plan>(m, "Plan", py::module_local())
        .def(py::init(&plan), py::kw_only(), py::arg("based"), py::arg("vote"), py::arg("merge"), py::arg("weights"),
             py::arg("divisors"), py::arg("scaling"), py::arg("rescale"), py::arg("keep"), py::arg("drop"),
             py::arg("lengths"), py::arg("first_group"), py::arg("keys"), py::arg("density"), py::arg("starts"),
             py::arg("inverse"));
    py::class_<cuda::Sweep>(m, "Sweep", py::module_local())
        .def(py::init(&sweep), py::kw_only(), py::arg("zero") = 1, py::arg("write") = true, py::arg("by_row") = false,
             py::arg("count") = 0, py::arg("decide") = 0, py::arg("mark") = 0, py::arg("marked") = 0,
             py::arg("kept") = 0, py::arg("counts") = 0);
    m.def("mark_words", &cuda::mark_words, py::arg("rows"));
    m.def(
        "consensus",
        [](const cuda::Rows& rows, const cuda::Plan& plan, const cuda::Sweep& sweep, const QueuePair& queue) {
            cuda::consensus(rows, plan, sweep, queue_of(queue));
        },
        py::arg("rows"), py::arg("plan"), py::arg("sweep"), py::arg("queue"), NoGil());

    m.attr("most_small") = cuda::most_small;
    py::class_<Selection>(m, "Ranking", py::module_local())
        .def(py::init(&ranking), py::kw_only(), py::arg("based"), py::arg("whole"), py::arg("exact"), py::arg("models"),
             py::arg("groups"), py::arg("ranks"), py::arg("lengths"), py::arg("first_group"), py::arg("row_starts"),
             py::arg("k"), py::arg("large"), py::arg("large_on_device"), py::arg("result"));
    m.def(
        "select_workspace",
        [](const cuda::Rows& rows, const Selection& ranking) {
            return cuda::select_workspace(rows, ranking, ranking.groups_of);
        },
        py::arg("rows"), py::arg("ranking"));
    m.def(
        "select",
        [](const cuda::Rows& rows, const Selection& ranking, Address workspace, const QueuePair& queue) {
            cuda::select(rows, ranking, ranking.groups_of, at<void>(workspace), queue_of(queue));
        },
        py::arg("rows"), py::arg("ranking"), py::arg("workspace"), py::arg("queue"), NoGil());

    py::class_<cuda::Stack>(m, "Stack", py::module_local())
        .def(py::init(&stack), py::kw_only(), py::arg("problems"), py::arg("rows"), py::arg("cols"),
             py::arg("matrices"), py::arg("dtype"), py::arg("maximize"), py::arg("starts"), py::arg("columns"),
             py::arg("u"), py::arg("v"), py::arg("primal"), py::arg("dual"), py::arg("faults"));
    m.def("assign_workspace", &cuda::assign_workspace, py::arg("stack"));
    m.def(
        "assign",
        [](const cuda::Stack& stack, Address workspace, const QueuePair& queue) {
            cuda::assign(stack, at<void>(workspace), queue_of(queue));
        },
        py::arg("stack"), py::arg("workspace"), py::arg("queue"), NoGil());
    m.def(
        "assign_nearest",
        [](const cuda::Stack& stack, Address solved, Address workspace, const QueuePair& queue) {
            cuda::assign_nearest(stack, at<std::int32_t>(solved), at<void>(workspace), queue_of(queue));
        },
        py::arg("stack"), py::arg("solved"), py::arg("workspace"), py::arg("queue"), NoGil());
}
