// Gathers along the axes of many tensors.
//
// A tensor is brought to a form of rows: one row of the result is `items` units, each of which lies together in the
// source. A unit is as long as axes that stay, and runs of an index, allow; other axes become tables of offsets.

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <optional>

#include "work.h"

namespace isthmus::cpu {

namespace {

constexpr std::int64_t long_unit = 256;          // bytes from which on a unit is a row of its own
constexpr std::int64_t most_items = 4096;        // of a row that is made of short ones
constexpr std::int64_t piece_bytes = 2048;       // gathered at a time
constexpr std::int64_t prefetched_bytes = 4096;  // that lie, where rows are short, between what is read and fetched

// Part of an axis: the byte offsets of its entries, or for one that stays the stride between them.
struct Axis {
    std::int64_t size, stride;
    std::vector<std::int64_t> table;

    bool stays() const { return table.empty(); }
    std::int64_t offset(std::int64_t i) const { return stays() ? i * stride : table[i]; }
};

// The longest runs, all of one length, that an index is made of.
std::int64_t run_length(const std::int64_t* index, std::int64_t size) {
    std::int64_t run = size;
    for (std::int64_t i = 1; i < size && run > 1; ++i)
        if (index[i] != index[i - 1] + 1) run = std::gcd(run, i);
    return run;
}

// The axes of a result from outer to inner, with runs apart and neighbours joined where both stay.
std::vector<Axis> axes_of(const Source& source) {
    std::vector<Axis> axes;
    const auto add = [&](Axis axis) {
        if (axis.size == 1 && axis.stays()) return;
        if (!axes.empty() && axes.back().stays() && axis.stays() && axes.back().stride == axis.stride * axis.size) {
            axes.back().size *= axis.size;
            axes.back().stride = axis.stride;
        } else {
            axes.push_back(std::move(axis));
        }
    };
    for (std::size_t d = 0; d < source.shape.size(); ++d) {
        const std::int64_t size = source.shape[d], stride = source.strides[d] * source.element_size;
        const std::int64_t* index = source.indices[d];
        const std::int64_t run = index == nullptr ? size : run_length(index, size);
        if (run < size) {
            Axis moved{size / run, 0, std::vector<std::int64_t>(size / run)};
            for (std::int64_t i = 0; i < moved.size; ++i) moved.table[i] = index[i * run] * stride;
            add(std::move(moved));
        }
        add({run, stride, {}});
    }
    return axes;
}

// A tensor in the form of rows.
struct Rows {
    const char* source;
    std::int64_t bytes, unit, items = 1;
    std::int64_t span = 0;                         // bytes of the source from a row's start to the end of its last unit
    std::vector<std::int32_t> near;                // [item], its offset in the row
    std::vector<std::int64_t> far;                 // the same, where 32 bits are too few
    std::vector<std::vector<std::int64_t>> outer;  // axis -> offsets of its entries; rows lie in C-order

    explicit Rows(const Source& from)
        : source(reinterpret_cast<const char*>(from.address)), bytes(from.element_size), unit(from.element_size) {
        for (const std::int64_t size : from.shape) bytes *= size;
        if (bytes == 0) return;
        std::vector<Axis> axes = axes_of(from);
        if (!axes.empty() && axes.back().stays() && axes.back().stride == unit) {
            unit *= axes.back().size;
            axes.pop_back();
        }
        std::vector<std::int64_t> offsets{0};
        while (!axes.empty() && unit < long_unit &&
               (items == 1 || (items * unit < long_unit && items * axes.back().size <= most_items))) {
            std::vector<std::int64_t> joined;
            joined.reserve(items * axes.back().size);
            for (std::int64_t i = 0; i < axes.back().size; ++i)
                for (const std::int64_t offset : offsets) joined.push_back(axes.back().offset(i) + offset);
            offsets = std::move(joined);
            items = offsets.size();
            axes.pop_back();
        }
        span = *std::max_element(offsets.begin(), offsets.end()) + unit;
        if (span <= std::numeric_limits<std::int32_t>::max())
            near.assign(offsets.begin(), offsets.end());
        else
            far = std::move(offsets);
        for (const Axis& axis : axes) {
            outer.emplace_back(axis.size);
            for (std::int64_t i = 0; i < axis.size; ++i) outer.back()[i] = axis.offset(i);
        }
    }

    std::int64_t row_bytes() const { return items * unit; }
};

// Reads a tensor's result from any byte on.
class Reader {
   public:
    Reader(const Rows& rows, std::int64_t begin)
        : rows_(rows),
          at_(begin % rows.row_bytes()),
          place_(rows.outer.size()),
          ahead_(rows.span > 2 * rows.row_bytes()
                     ? 0
                     : std::clamp<std::int64_t>(prefetched_bytes / rows.row_bytes(), 1, most_ahead)),
          gather_(loops().gather) {
        std::int64_t row = begin / rows.row_bytes();
        for (std::size_t d = place_.size(); d-- > 0; row /= size(d)) place_[d] = row % size(d);
        for (std::int64_t k = 0; k <= ahead_; ++k) look_ahead();
    }

    // Write the next bytes of the result to `out`.
    void read(char* out, std::int64_t bytes) {
        while (bytes > 0) {
            if (at_ == rows_.row_bytes()) {
                at_ = 0;
                ++row_;
                look_ahead();
            }
            const std::int64_t n = std::min(bytes, std::min(piece_bytes, rows_.row_bytes() - at_));
            // Rows, and units in a row, are read in an order that processors do not foresee: meanwhile fetch the same
            // part of a later row.
            if (const char* later = starts_[(row_ + ahead_) % starts_.size()]; ahead_ > 0 && later != nullptr)
                for (std::int64_t i = 0; i < n; i += 64) __builtin_prefetch(later + at_ + i);
            read_in_row(out, n);
            out += n;
            bytes -= n;
        }
    }

   private:
    static constexpr std::int64_t most_ahead = 7;

    std::int64_t size(std::size_t d) const { return rows_.outer[d].size(); }

    // Note where one more row begins, or nullptr after the last, and go on.
    void look_ahead() {
        const char* row = rows_.source;
        for (std::size_t d = 0; d < place_.size(); ++d) row += rows_.outer[d][place_[d]];
        starts_[seen_++ % starts_.size()] = over_ ? nullptr : row;
        for (std::size_t d = place_.size(); d-- > 0; place_[d] = 0)
            if (++place_[d] < size(d)) return;
        over_ = true;
    }

    const char* row() const { return starts_[row_ % starts_.size()]; }

    const char* unit_at(std::int64_t item) const {
        return row() + (rows_.far.empty() ? rows_.near[item] : rows_.far[item]);
    }

    void read_in_row(char* out, std::int64_t bytes) {
        const std::int64_t unit = rows_.unit;
        std::int64_t item = at_ / unit;
        at_ += bytes;
        if (const std::int64_t past = (at_ - bytes) % unit; past > 0) {
            const std::int64_t n = std::min(bytes, unit - past);
            std::memcpy(out, unit_at(item++) + past, n);
            out += n;
            bytes -= n;
        }
        const std::int64_t whole = bytes / unit;
        if (rows_.far.empty())
            std::get<0>(gather_)(row(), rows_.near.data() + item, whole, unit, out);
        else
            std::get<1>(gather_)(row(), rows_.far.data() + item, whole, unit, out);
        if (const std::int64_t rest = bytes - whole * unit; rest > 0)
            std::memcpy(out + whole * unit, unit_at(item + whole), rest);
    }

    const Rows& rows_;
    std::int64_t at_;                  // bytes of the row that are read
    std::vector<std::int64_t> place_;  // of the first row whose start is not noted yet
    std::int64_t ahead_;               // rows between the one that is read and the one that is fetched
    std::size_t row_ = 0, seen_ = 0;   // rows read, and starts noted, since the first
    bool over_ = false;
    std::array<const char*, most_ahead + 1> starts_{};
    decltype(Loops::gather) gather_;
};

std::vector<Rows> rows_of(const std::vector<Source>& sources) { return {sources.begin(), sources.end()}; }

}  // namespace

std::optional<std::size_t> first_out_of_range(const std::vector<Index>& indices) {
    for (std::size_t i = 0; i < indices.size(); ++i) {
        bool out = false;
        for (std::int64_t j = 0; j < indices[i].size; ++j)
            out |= static_cast<std::uint64_t>(indices[i].values[j]) >= static_cast<std::uint64_t>(indices[i].size);
        if (out) return i;
    }
    return std::nullopt;
}

bool outputs_are_disjoint(std::vector<Span> outputs, const std::vector<Source>& sources) {
    const auto by_begin = [](const Span& x, const Span& y) { return x.begin < y.begin; };
    outputs.erase(std::remove_if(outputs.begin(), outputs.end(), [](const Span& x) { return x.begin == x.end; }),
                  outputs.end());
    std::sort(outputs.begin(), outputs.end(), by_begin);
    for (std::size_t i = 1; i < outputs.size(); ++i)
        if (outputs[i].begin < outputs[i - 1].end) return false;
    const auto meets = [&](std::uintptr_t begin, std::int64_t bytes) {
        const auto after = std::lower_bound(outputs.begin(), outputs.end(), Span{begin + bytes, 0}, by_begin);
        return bytes > 0 && after != outputs.begin() && std::prev(after)->end > begin;
    };
    for (const Source& source : sources) {
        std::int64_t bytes = source.element_size;
        for (const std::int64_t size : source.shape) bytes *= size;
        if (meets(source.address, bytes)) return false;
        for (std::size_t d = 0; d < source.shape.size(); ++d)
            if (source.indices[d] != nullptr &&
                meets(reinterpret_cast<std::uintptr_t>(source.indices[d]), source.shape[d] * sizeof(std::int64_t)))
                return false;
    }
    return true;
}

void permute(const std::vector<Source>& sources, const std::vector<std::uintptr_t>& outputs, int threads) {
    const std::vector<Rows> rows = rows_of(sources);
    std::vector<std::int64_t> sizes;
    for (const Rows& tensor : rows) sizes.push_back(tensor.bytes);
    const std::int64_t bytes = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
    const bool stream = bytes >= stream_bytes;
    const auto past_caches = loops().stream;
    for_shares(sizes, useful_threads(2 * bytes, threads),
               [&](std::size_t r, std::int64_t begin, std::int64_t end, int) {
                   Reader reader(rows[r], begin);
                   char* out = reinterpret_cast<char*>(outputs[r]) + begin;
                   std::int64_t left = end - begin;
                   if (!stream) return reader.read(out, left);
                   alignas(64) char piece[piece_bytes];
                   // The first piece ends with a cache line.
                   const std::int64_t past = reinterpret_cast<std::uintptr_t>(out) % 64;
                   if (past > 0) {
                       const std::int64_t n = std::min(left, 64 - past);
                       reader.read(out, n);
                       out += n;
                       left -= n;
                   }
                   for (; left > 0; left -= std::min(left, piece_bytes), out += piece_bytes) {
                       const std::int64_t n = std::min(left, piece_bytes);
                       reader.read(piece, n);
                       past_caches(out, piece, n);
                   }
               });
}

void lerp_permuted(const Table& table, const std::vector<Source>& sources, const std::vector<Dtype>& dtypes,
                   const std::vector<double>& weights, int threads) {
    const auto loop = loops().lerp;
    const bool per_row = weights.size() > 1;
    const std::vector<Rows> rows = rows_of(sources);
    for_ranges(table, threads, [&](const Range& range, std::size_t r, int) {
        const Operand& a = range.inputs[0];
        const int size = size_of(dtypes[r]);
        Reader reader(rows[r], range.begin * size);
        alignas(64) char permuted[chunk * sizeof(double)];
        for (std::int64_t begin = range.begin; begin < range.end; begin += chunk) {
            const std::int64_t n = std::min(chunk, range.end - begin);
            reader.read(permuted, n * size);
            const Operand inputs[] = {{a.address + begin * size_of(a.dtype), a.dtype},
                                      {reinterpret_cast<std::uintptr_t>(permuted), dtypes[r]}};
            const Operand output{range.output.address + begin * size_of(range.output.dtype), range.output.dtype};
            loop({inputs, 2, output, 0, n, range.stream}, weights[per_row ? r : 0]);
        }
    });
}

}  // namespace isthmus::cpu
