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
constexpr std::uint8_t dl_int = 0, dl_uint = 1, dl_float = 2, dl_bfloat = 4, dl_bool = 6;

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

bool same_shape(const DLTensor& x, const DLTensor& y) {
    return x.ndim == y.ndim && std::equal(x.shape, x.shape + x.ndim, y.shape);
}

// A plain tensor of the CPU in C-order, of any dtype, or nothing.
std::optional<DLTensor> described(PyObject* object) {
    PyTypeObject* type = Py_TYPE(object);
    if (type != torch_types.tensor && type != torch_types.parameter) return std::nullopt;
    DLTensor t;
    if (torch_types.api->describe(object, &t) != 0) {
        PyErr_Clear();
        return std::nullopt;
    }
    if (t.device.type != dl_cpu) return std::nullopt;
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

// One that can be merged, or nothing: then Python looks closer and says what is the matter.
std::optional<DLTensor> plain(PyObject* object) {
    const std::optional<DLTensor> t = described(object);
    return t && dtype_of(*t) ? t : std::nullopt;
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
            return same_shape(*t, *first);
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

ArrayPlan plan(bool based, Vote vote, ZeroSign zero_sign, bool tally_rows, MergeFunc merge, const py::object& weights,
               const py::object& divisors, const py::object& scaling, const py::object& rescale,
               const std::pair<py::object, py::object>& keep, const std::pair<py::object, py::object>& drop,
               const py::object& lengths) {
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

// What a permutation reads and writes, and whether a gradient is recorded for any of its inputs.
struct TensorSources {
    std::vector<cpu::Source> sources;
    std::vector<std::uintptr_t> outputs;
    bool requires_grad = false;
};

// Whether a tensor's values can be moved: real numbers, integers and booleans. Complex ones may be lazily conjugated.
bool can_move(const DLTensor& t) {
    switch (t.dtype.code) {
        case dl_int:
        case dl_bool: return t.dtype.lanes == 1;
        case dl_uint: return t.dtype.lanes == 1 && t.dtype.bits == 8;
        default: return dtype_of(t).has_value();
    }
}

// The entries of a list or a tuple, or nothing.
std::optional<std::pair<PyObject**, std::size_t>> entries(PyObject* object) {
    if (!PyList_CheckExact(object) && !PyTuple_CheckExact(object)) return std::nullopt;
    return std::pair{PySequence_Fast_ITEMS(object), static_cast<std::size_t>(PySequence_Fast_GET_SIZE(object))};
}

// The sources of a permutation where all tensors and indices are plain and valid, and outputs, if any, are plain,
// disjoint from everything else and, if asked for, of the dtypes of the tensors; else nothing.
std::optional<TensorSources> plain_sources(const py::list& tensors, const py::object& indices,
                                           const std::optional<py::list>& out, bool same_dtype) {
    if (torch_types.api == nullptr) return std::nullopt;
    const auto rows = entries(indices.ptr());
    if (!rows || rows->second != tensors.size() || (out && out->size() != tensors.size())) return std::nullopt;
    TensorSources result;
    std::vector<cpu::Index> given;
    std::vector<cpu::Span> outputs;
    const py::str requires_grad = py::reinterpret_steal<py::str>(PyUnicode_InternFromString("requires_grad"));
    for (std::size_t r = 0; r < tensors.size(); ++r) {
        const std::optional<DLTensor> t = described(PyList_GET_ITEM(tensors.ptr(), r));
        if (!t || !can_move(*t)) return std::nullopt;
        result.requires_grad |= tensors[r].attr(requires_grad).ptr() == Py_True;
        cpu::Source source{reinterpret_cast<std::uintptr_t>(t->data),
                           t->dtype.bits / 8,
                           {t->shape, t->shape + t->ndim},
                           std::vector<std::int64_t>(t->ndim),
                           std::vector<const std::int64_t*>(t->ndim)};
        std::int64_t stride = 1;
        for (int d = t->ndim - 1; d >= 0; stride *= t->shape[d--]) source.strides[d] = stride;
        if (PyObject* row = rows->first[r]; row != Py_None) {
            const auto axes = entries(row);
            if (!axes || axes->second != source.shape.size()) return std::nullopt;
            for (std::size_t d = 0; d < axes->second; ++d) {
                if (axes->first[d] == Py_None) continue;
                const std::optional<DLTensor> index = described(axes->first[d]);
                if (!index || index->dtype.code != dl_int || index->dtype.bits != 64 || index->ndim != 1 ||
                    index->shape[0] != source.shape[d])
                    return std::nullopt;
                source.indices[d] = static_cast<const std::int64_t*>(index->data);
                given.push_back({source.indices[d], source.shape[d]});
            }
        }
        if (out) {
            const std::optional<DLTensor> target = described(PyList_GET_ITEM(out->ptr(), r));
            if (!target || !same_shape(*target, *t) || !can_move(*target)) return std::nullopt;
            if (same_dtype && (target->dtype.code != t->dtype.code || target->dtype.bits != t->dtype.bits))
                return std::nullopt;
            result.outputs.push_back(reinterpret_cast<std::uintptr_t>(target->data));
            outputs.push_back({result.outputs.back(), result.outputs.back() + numel(*target) * target->dtype.bits / 8});
        }
        result.sources.push_back(std::move(source));
    }
    if (cpu::first_out_of_range(given) || !cpu::outputs_are_disjoint(outputs, result.sources)) return std::nullopt;
    return result;
}

// Sources from addresses, with the axes in the order in which those of the outputs lie: address, element size, shape,
// strides, and the address of each index or 0.
using SourceTuple = std::tuple<std::uintptr_t, std::int64_t, std::vector<std::int64_t>, std::vector<std::int64_t>,
                               std::vector<std::uintptr_t>>;

TensorSources sources(const std::vector<SourceTuple>& tuples) {
    TensorSources result;
    for (const auto& [address, element_size, shape, strides, indices] : tuples) {
        result.sources.push_back({address, element_size, shape, strides, {}});
        for (const std::uintptr_t index : indices)
            result.sources.back().indices.push_back(reinterpret_cast<const std::int64_t*>(index));
    }
    return result;
}

std::optional<std::size_t> first_out_of_range(const std::vector<std::pair<std::uintptr_t, std::int64_t>>& indices) {
    std::vector<cpu::Index> given;
    for (const auto& [address, size] : indices) given.push_back({reinterpret_cast<const std::int64_t*>(address), size});
    return cpu::first_out_of_range(given);
}

using Doubles = py::array_t<double, py::array::c_style | py::array::forcecast>;

// Problems of one shape: float32 or float64, [problem][row][column], and duals of the columns to start from, or none.
using Stack = std::pair<py::array, std::optional<Doubles>>;

// For each stack the columns of the rows; where a certificate is wanted the objectives, their bounds and the duals of
// rows and columns, else None; and the first fault with its problem, row and column, or None.
py::list assign(const std::vector<Stack>& stacks, bool maximize, bool certificate, int threads) {
    std::vector<cpu::Problem> problems;
    std::vector<std::tuple<Integers, std::optional<Doubles>, std::optional<Doubles>>> outputs;
    for (const auto& [matrices, start] : stacks) {
        const py::ssize_t n = matrices.shape(0), rows = matrices.shape(1), cols = matrices.shape(2);
        auto& [columns, u, v] = outputs.emplace_back(Integers({n, rows}), std::nullopt, std::nullopt);
        if (certificate) {
            u = Doubles({n, rows});
            v = Doubles({n, cols});
        }
        const Dtype dtype = py::isinstance<py::array_t<float>>(matrices) ? Dtype::f32 : Dtype::f64;
        const auto address = reinterpret_cast<std::uintptr_t>(matrices.data());
        for (py::ssize_t k = 0; k < n; ++k)
            problems.push_back({{address + k * rows * cols * matrices.itemsize(), dtype},
                                rows,
                                cols,
                                maximize,
                                start ? start->data() + k * cols : nullptr,
                                columns.mutable_data() + k * rows,
                                u ? u->mutable_data() + k * rows : nullptr,
                                v ? v->mutable_data() + k * cols : nullptr});
    }
    std::vector<cpu::Assignment> found;
    {
        const py::gil_scoped_release release;
        found = cpu::assign(problems, threads);
    }
    py::list results;
    auto first = found.cbegin();
    for (const auto& [columns, u, v] : outputs) {
        const auto last = first + columns.shape(0);
        const auto bad = std::find_if(first, last, [](const auto& a) { return a.fault != cpu::Fault::none; });
        py::object fault = py::none(), proof = py::none();
        if (bad != last) fault = py::make_tuple(bad->fault, bad - first, bad->row, bad->column);
        if (certificate) {
            Doubles objectives({py::ssize_t{2}, columns.shape(0)});
            double* to = objectives.mutable_data();
            to = std::transform(first, last, to, [](const auto& a) { return a.primal; });
            std::transform(first, last, to, [](const auto& a) { return a.dual; });
            proof = py::make_tuple(objectives, u, v);
        }
        results.append(py::make_tuple(columns, proof, fault));
        first = last;
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

    py::class_<TensorSources>(m, "Sources")
        .def_readonly("requires_grad", &TensorSources::requires_grad)
        .def_readwrite("outputs", &TensorSources::outputs)
        .def(py::init(&sources), py::arg("sources"));
    m.def("plain_sources", &plain_sources, py::arg("tensors"), py::arg("indices"), py::arg("out"),
          py::arg("same_dtype"));
    m.def("first_out_of_range", &first_out_of_range, py::arg("indices"));
    m.def(
        "permute", [](const TensorSources& s, int threads) { cpu::permute(s.sources, s.outputs, threads); },
        py::arg("sources"), py::arg("threads"), py::call_guard<py::gil_scoped_release>());
    m.def(
        "lerp_permuted",
        [](const TensorTable& table, const TensorSources& s, const std::vector<Dtype>& dtypes,
           const std::vector<double>& weights,
           int threads) { cpu::lerp_permuted(table, s.sources, dtypes, weights, threads); },
        py::arg("table"), py::arg("sources"), py::arg("dtypes"), py::arg("weights"), py::arg("threads"),
        py::call_guard<py::gil_scoped_release>());

    py::enum_<Vote>(m, "Vote")
        .value("none", Vote::none)
        .value("total", Vote::total)
        .value("weighted_total", Vote::weighted_total)
        .value("frequency", Vote::frequency);
    py::enum_<ZeroSign>(m, "ZeroSign")
        .value("majority", ZeroSign::majority)
        .value("positive", ZeroSign::positive)
        .value("negative", ZeroSign::negative)
        .value("zero", ZeroSign::zero);
    py::enum_<MergeFunc>(m, "MergeFunc")
        .value("sum", MergeFunc::sum)
        .value("mean", MergeFunc::mean)
        .value("max", MergeFunc::max);
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
    m.def("assign", &assign, py::arg("stacks"), py::arg("maximize"), py::arg("certificate"), py::arg("threads"));

    m.def("instruction_sets", [] {
        std::vector<std::pair<std::string, bool>> sets;
        for (const auto& set : cpu::instruction_sets()) sets.emplace_back(set.name, set.supported);
        return sets;
    });
    m.def("instruction_set", &cpu::instruction_set);
    m.def("use_instruction_set", &cpu::use_instruction_set, py::arg("name"));
    m.def("has_openmp", &cpu::has_openmp);
}
