// isthmus._cpu: addresses in, exceptions out. Everything public is validated in Python.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <optional>

#include "../cpu/api.h"

namespace py = pybind11;
using namespace isthmus;

namespace {

// The parts of the DLPack 1.3 C exchange interface that are used: a table of functions, in a capsule that the tensor
// type carries, of which one describes a tensor without taking a reference to it.
struct DLTensor {
    void* data;
    struct {
        std::int32_t type, id;
    } device;
    std::int32_t ndim;
    struct {
        std::uint8_t code, bits;
        std::uint16_t lanes;
    } dtype;
    std::int64_t* shape;
    std::int64_t* strides;
    std::uint64_t byte_offset;
};
struct ExchangeApi {
    std::uint32_t major, minor;
    ExchangeApi* previous;
    void* managed_tensor_allocator;
    void* managed_tensor_from_object;
    void* managed_tensor_to_object;
    int (*describe)(void* object, DLTensor* out);
    void* current_work_stream;
};
constexpr std::int32_t dl_cpu = 1;
constexpr std::uint8_t dl_float = 2, dl_bfloat = 4;

struct {
    PyTypeObject *tensor = nullptr, *parameter = nullptr;
    const ExchangeApi* api = nullptr;
} torch_types;

void accept_tensors(py::type tensor, py::type parameter, const py::object& capsule) {
    torch_types.tensor = reinterpret_cast<PyTypeObject*>(tensor.ptr());
    torch_types.parameter = reinterpret_cast<PyTypeObject*>(parameter.ptr());
    if (capsule.is_none()) return;
    const auto* api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (api == nullptr) throw py::error_already_set();
    if (api->major == 1) torch_types.api = api;
}

std::optional<Dtype> dtype_of(const DLTensor& t) {
    if (t.dtype.lanes != 1) return std::nullopt;
    if (t.dtype.code == dl_bfloat && t.dtype.bits == 16) return Dtype::bf16;
    if (t.dtype.code != dl_float) return std::nullopt;
    switch (t.dtype.bits) {
        case 64: return Dtype::f64;
        case 32: return Dtype::f32;
        case 16: return Dtype::f16;
        default: return std::nullopt;
    }
}

std::int64_t numel(const DLTensor& t) {
    return std::accumulate(t.shape, t.shape + t.ndim, std::int64_t{1}, std::multiplies<>{});
}

// A plain tensor of the CPU in C-order, or nothing: then Python looks closer and says what is the matter.
std::optional<DLTensor> plain(PyObject* object) {
    PyTypeObject* type = Py_TYPE(object);
    if (type != torch_types.tensor && type != torch_types.parameter) return std::nullopt;
    DLTensor t;
    if (torch_types.api->describe(object, &t) != 0) {
        PyErr_Clear();
        return std::nullopt;
    }
    if (t.device.type != dl_cpu || !dtype_of(t)) return std::nullopt;
    std::int64_t stride = 1;
    for (int d = t.ndim - 1; d >= 0; --d) {
        if (t.strides != nullptr && t.shape[d] != 1 && t.strides[d] != stride) return std::nullopt;
        stride *= t.shape[d];
    }
    if (stride == 0) return std::nullopt;
    // A single element is contiguous at any stride, so it may be the lazily negated imaginary part of a complex one.
    if (stride == 1 && py::handle(object).attr("is_neg")().cast<bool>()) return std::nullopt;
    t.data = static_cast<char*>(t.data) + t.byte_offset;
    return t;
}

// A table of tensors, and whether a gradient is recorded for any of its inputs.
struct TensorTable : cpu::Table {
    bool requires_grad = false;
};

// The table of equally long columns of tensors, where each row has one shape, all are plain, and outputs, if any,
// are as the table demands; else nothing.
std::optional<TensorTable> plain_table(const std::vector<py::list>& columns, const std::optional<py::list>& out) {
    if (torch_types.api == nullptr) return std::nullopt;
    const std::size_t rows = columns[0].size();
    for (const py::list& column : columns)
        if (column.size() != rows) return std::nullopt;
    if (out && out->size() != rows) return std::nullopt;
    TensorTable table;
    table.width = columns.size();
    const py::str requires_grad = py::reinterpret_steal<py::str>(PyUnicode_InternFromString("requires_grad"));
    for (std::size_t r = 0; r < rows; ++r) {
        std::optional<DLTensor> first;
        const auto add = [&](const py::list& column, std::vector<cpu::Operand>& operands) {
            const std::optional<DLTensor> t = plain(PyList_GET_ITEM(column.ptr(), r));
            if (!t) return false;
            if (!first) first = t;
            operands.push_back({reinterpret_cast<std::uintptr_t>(t->data), *dtype_of(*t)});
            return t->ndim == first->ndim && std::equal(t->shape, t->shape + t->ndim, first->shape);
        };
        for (const py::list& column : columns) {
            if (!add(column, table.inputs)) return std::nullopt;
            table.requires_grad |= column[r].attr(requires_grad).ptr() == Py_True;
        }
        if (out && !add(*out, table.outputs)) return std::nullopt;
        table.numel.push_back(numel(*first));
    }
    if (out && !cpu::outputs_are_disjoint(table)) return std::nullopt;
    return table;
}

// The places of tensors of one dtype and shape, for each dtype and shape; all tensors are plain.
std::vector<std::vector<std::size_t>> alike(const py::list& tensors) {
    std::map<std::pair<Dtype, std::vector<std::int64_t>>, std::size_t> group_of;
    std::vector<std::vector<std::size_t>> groups;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
        const std::optional<DLTensor> t = plain(PyList_GET_ITEM(tensors.ptr(), i));
        if (!t) throw py::value_error("a tensor is not plain");
        const auto [place, added] =
            group_of.try_emplace({*dtype_of(*t), {t->shape, t->shape + t->ndim}}, groups.size());
        if (added) groups.emplace_back();
        groups[place->second].push_back(i);
    }
    return groups;
}

// Give a table its outputs: new plain tensors, one for each row.
void set_outputs(TensorTable& table, const py::list& out) {
    table.outputs.clear();
    for (const py::handle tensor : out) {
        const std::optional<DLTensor> t = plain(tensor.ptr());
        if (!t) throw py::value_error("an output is not a plain tensor");
        table.outputs.push_back({reinterpret_cast<std::uintptr_t>(t->data), *dtype_of(*t)});
    }
}

// A table from addresses: per row, one (address, dtype) for each input and then for the output.
TensorTable table(const std::vector<std::int64_t>& numel,
                  const std::vector<std::vector<std::pair<std::uintptr_t, Dtype>>>& rows) {
    TensorTable result;
    result.width = rows.empty() ? 0 : rows[0].size() - 1;
    result.numel = numel;
    for (const auto& row : rows) {
        for (std::size_t k = 0; k < result.width; ++k) result.inputs.push_back({row[k].first, row[k].second});
        result.outputs.push_back({row.back().first, row.back().second});
    }
    return result;
}

// A plan and the arrays that it points to.
struct ArrayPlan : cpu::Plan {
    std::vector<py::object> arrays;
    std::vector<double> ones;  // the divisors unless given

    template <class T>
    const T* keep_alive(const py::object& array) {
        if (array.is_none()) return nullptr;
        arrays.push_back(py::array_t<T, py::array::c_style | py::array::forcecast>(array));
        return static_cast<const T*>(py::reinterpret_borrow<py::array>(arrays.back()).data());
    }
};

ArrayPlan plan(bool based, cpu::Vote vote, cpu::ZeroSign zero_sign, bool tally_rows, cpu::MergeFunc merge,
               const py::object& weights, const py::object& divisors, const py::object& scaling,
               const py::object& rescale, const std::pair<py::object, py::object>& keep,
               const std::pair<py::object, py::object>& drop, const py::object& lengths) {
    ArrayPlan p;
    p.based = based;
    p.vote = vote;
    p.zero_sign = zero_sign;
    p.tally_rows = tally_rows;
    p.merge = merge;
    p.weights = p.keep_alive<double>(weights);
    p.divisors = p.keep_alive<double>(divisors);
    if (p.divisors == nullptr) {
        p.ones.assign(py::array(weights).size(), 1);
        p.divisors = p.ones.data();
    }
    p.scaling = p.keep_alive<double>(scaling);
    p.rescale = p.keep_alive<double>(rescale);
    p.keep = {p.keep_alive<double>(keep.first), p.keep_alive<std::int64_t>(keep.second)};
    p.drop = {p.keep_alive<double>(drop.first), p.keep_alive<std::int64_t>(drop.second)};
    p.lengths = p.keep_alive<std::int64_t>(lengths);
    return p;
}

void draw(ArrayPlan& p, const py::object& keys, const py::object& density, const py::object& epsilon,
          const py::object& starts, bool inverse) {
    p.random.keys = p.keep_alive<std::int64_t>(keys);
    p.random.density = p.keep_alive<double>(density);
    p.random.epsilon = p.keep_alive<double>(epsilon);
    p.random.starts = p.keep_alive<std::int64_t>(starts);
    p.random.inverse = inverse;
}

using Integers = py::array_t<std::int64_t, py::array::c_style | py::array::forcecast>;

const std::int64_t* data(const std::optional<Integers>& array) { return array ? array->data() : nullptr; }

template <class T>
py::array_t<T> to_array(const std::vector<T>& values, std::vector<py::ssize_t> shape) {
    return py::array_t<T>(std::move(shape), values.data());
}

// The cuts of each rank, and how many magnitudes lie above and at them: their values as [group][model][rank], and as
// many indices, counts above and counts at them in one array; then the first row and model that are not finite.
py::tuple find_cuts(const TensorTable& table, bool based, bool whole, const std::optional<Integers>& lengths,
                    const Integers& ranks, bool exact, int threads) {
    cpu::Selection found;
    const cpu::Ranks wanted{ranks.data(), static_cast<std::size_t>(ranks.shape(2)), exact};
    {
        const py::gil_scoped_release release;
        found = cpu::select(table, based, whole, data(lengths), wanted, threads);
    }
    const py::ssize_t groups = ranks.shape(0), models = ranks.shape(1);
    Integers counts({py::ssize_t{3}, groups, models, ranks.shape(2)});
    std::int64_t* to = counts.mutable_data();
    for (const auto* of : {&found.index, &found.above, &found.equal}) to = std::copy(of->begin(), of->end(), to);
    const auto nonfinite = found.bad_row < 0 ? py::object(py::none()) : py::make_tuple(found.bad_row, found.bad_model);
    return py::make_tuple(to_array(found.value, {groups, models, ranks.shape(2)}), counts, nonfinite);
}

py::object consensus(const TensorTable& table, const ArrayPlan& plan, bool wanted, int threads) {
    cpu::Stats stats;
    {
        const py::gil_scoped_release release;
        stats = cpu::consensus(table, plan, wanted, threads);
    }
    if (!wanted) return py::none();
    const py::ssize_t rows = table.rows(), models = table.width - plan.based;
    return py::make_tuple(to_array(stats.kept, {rows, models}), to_array(stats.positive, {rows}),
                          to_array(stats.negative, {rows}), to_array(stats.cancelled, {rows}),
                          to_array(stats.conflicts, {rows}));
}

py::array_t<double> l1(const TensorTable& table, const ArrayPlan& plan, int threads) {
    std::vector<double> sums;
    {
        const py::gil_scoped_release release;
        sums = cpu::l1(table, plan, threads);
    }
    const py::ssize_t rows = table.rows(), models = table.width - plan.based;
    return to_array(sums, {rows, models, 2});
}

py::array_t<double> gram(const TensorTable& table, bool based, const std::optional<Integers>& lengths, int threads) {
    std::vector<double> sums;
    {
        const py::gil_scoped_release release;
        sums = cpu::gram(table, based, data(lengths), threads);
    }
    const py::ssize_t models = table.width - based, groups = sums.size() / (models * models);
    return to_array(sums, {groups, models, models});
}

// Sources of a permutation: address, element size, shape, strides, and the address of each index or 0.
using SourceTuple = std::tuple<std::uintptr_t, std::int64_t, std::vector<std::int64_t>, std::vector<std::int64_t>,
                               std::vector<std::uintptr_t>>;

std::vector<cpu::Source> sources_of(std::vector<SourceTuple>& tuples) {
    std::vector<cpu::Source> sources;
    for (auto& [address, element_size, shape, strides, indices] : tuples) {
        sources.push_back({address, element_size, std::move(shape), std::move(strides), {}});
        for (const std::uintptr_t index : indices)
            sources.back().indices.push_back(reinterpret_cast<const std::int64_t*>(index));
    }
    return sources;
}

std::optional<std::size_t> first_out_of_range(const std::vector<std::pair<std::uintptr_t, std::int64_t>>& indices) {
    std::vector<cpu::Index> found;
    for (const auto& [address, size] : indices) found.push_back({reinterpret_cast<const std::int64_t*>(address), size});
    return cpu::first_out_of_range(found);
}

void permute(std::vector<SourceTuple> sources, const std::vector<std::uintptr_t>& outputs, int threads) {
    const py::gil_scoped_release release;
    cpu::permute(sources_of(sources), outputs, threads);
}

void lerp_permuted(const TensorTable& table, std::vector<SourceTuple> sources, const std::vector<Dtype>& dtypes,
                   const std::vector<double>& weights, int threads) {
    const py::gil_scoped_release release;
    cpu::lerp_permuted(table, sources_of(sources), dtypes, weights, threads);
}

using Doubles = py::array_t<double, py::array::c_style | py::array::forcecast>;

// Matrices as (address, dtype, rows, columns, duals of the columns to start from or None). For each: the columns of the
// rows, or its fault and where; then, where a certificate is wanted, the objective, its bound, and the duals.
py::list assign(
    const std::vector<std::tuple<std::uintptr_t, Dtype, std::int64_t, std::int64_t, std::optional<Doubles>>>& matrices,
    bool maximize, bool certificate, int threads) {
    std::vector<cpu::Problem> problems;
    for (const auto& [address, dtype, rows, cols, start] : matrices)
        problems.push_back({{address, dtype}, rows, cols, maximize, start ? start->data() : nullptr, certificate});
    std::vector<cpu::Assignment> found;
    {
        const py::gil_scoped_release release;
        found = cpu::assign(problems, threads);
    }
    py::list results;
    for (const cpu::Assignment& a : found) {
        const auto array = [](const auto& values) {
            return to_array(values, {static_cast<py::ssize_t>(values.size())});
        };
        results.append(
            py::make_tuple(array(a.columns), a.fault, a.row, a.column, a.primal, a.dual, array(a.u), array(a.v)));
    }
    return results;
}

}  // namespace

PYBIND11_MODULE(_cpu, m) {
    m.doc() = "Kernels of isthmus for the CPU.";

    py::enum_<Dtype>(m, "Dtype")
        .value("f64", Dtype::f64)
        .value("f32", Dtype::f32)
        .value("bf16", Dtype::bf16)
        .value("f16", Dtype::f16);
    py::class_<cpu::Table>(m, "Rows");
    py::class_<TensorTable, cpu::Table>(m, "Table", py::dynamic_attr())
        .def_readonly("requires_grad", &TensorTable::requires_grad)
        .def(py::init(&table), py::arg("numel"), py::arg("rows"))
        .def("set_outputs", &set_outputs, py::arg("out"));

    m.def("accept_tensors", &accept_tensors, py::arg("tensor"), py::arg("parameter"), py::arg("exchange_api"));
    m.def("plain_table", &plain_table, py::arg("columns"), py::arg("out"));
    m.def("alike", &alike, py::arg("tensors"));
    m.def("lerp", &cpu::lerp, py::arg("table"), py::arg("weights"), py::arg("threads"),
          py::call_guard<py::gil_scoped_release>());
    m.def("weighted_sum", &cpu::weighted_sum, py::arg("table"), py::arg("weights"), py::arg("threads"),
          py::call_guard<py::gil_scoped_release>());

    m.def("first_out_of_range", &first_out_of_range, py::arg("indices"));
    m.def("permute", &permute, py::arg("sources"), py::arg("outputs"), py::arg("threads"));
    m.def("lerp_permuted", &lerp_permuted, py::arg("table"), py::arg("sources"), py::arg("dtypes"), py::arg("weights"),
          py::arg("threads"));

    py::enum_<cpu::Vote>(m, "Vote")
        .value("none", cpu::Vote::none)
        .value("total", cpu::Vote::total)
        .value("weighted_total", cpu::Vote::weighted_total)
        .value("frequency", cpu::Vote::frequency);
    py::enum_<cpu::ZeroSign>(m, "ZeroSign")
        .value("majority", cpu::ZeroSign::majority)
        .value("positive", cpu::ZeroSign::positive)
        .value("negative", cpu::ZeroSign::negative)
        .value("zero", cpu::ZeroSign::zero);
    py::enum_<cpu::MergeFunc>(m, "MergeFunc")
        .value("sum", cpu::MergeFunc::sum)
        .value("mean", cpu::MergeFunc::mean)
        .value("max", cpu::MergeFunc::max);
    py::class_<ArrayPlan>(m, "Plan")
        .def(py::init(&plan), py::kw_only(), py::arg("based"), py::arg("vote"), py::arg("zero_sign"),
             py::arg("tally_rows"), py::arg("merge"), py::arg("weights"), py::arg("divisors"), py::arg("scaling"),
             py::arg("rescale"), py::arg("keep"), py::arg("drop"), py::arg("lengths"))
        .def("draw", &draw, py::arg("keys"), py::arg("density"), py::arg("epsilon"), py::arg("starts"),
             py::arg("inverse"));
    m.def("consensus", &consensus, py::arg("table"), py::arg("plan"), py::arg("stats"), py::arg("threads"));
    m.def("l1", &l1, py::arg("table"), py::arg("plan"), py::arg("threads"));
    m.def("gram", &gram, py::arg("table"), py::arg("based"), py::arg("lengths"), py::arg("threads"));
    m.def("select", &find_cuts, py::arg("table"), py::arg("based"), py::arg("whole"), py::arg("lengths"),
          py::arg("ranks"), py::arg("exact"), py::arg("threads"));

    py::enum_<cpu::Fault>(m, "Fault")
        .value("none", cpu::Fault::none)
        .value("nan", cpu::Fault::nan)
        .value("unbounded", cpu::Fault::unbounded)
        .value("infeasible", cpu::Fault::infeasible);
    m.def("assign", &assign, py::arg("matrices"), py::arg("maximize"), py::arg("certificate"), py::arg("threads"));

    m.def("instruction_sets", [] {
        std::vector<std::pair<std::string, bool>> sets;
        for (const auto& set : cpu::instruction_sets()) sets.emplace_back(set.name, set.supported);
        return sets;
    });
    m.def("instruction_set", &cpu::instruction_set);
    m.def("use_instruction_set", &cpu::use_instruction_set, py::arg("name"));
    m.def("has_openmp", &cpu::has_openmp);
}
