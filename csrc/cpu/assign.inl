// Linear assignment by shortest augmenting paths.
//
// Included after assign_rows.inl. With a dual v for each column, w(i, j) = c(i, j) - v(j) orders the columns by how
// near they are to row i. (A row's own dual is its w at the column that it is matched with, so none is kept.) A search
// grows a tree of alternating paths from an unmatched row, always from the nearest column, until that is an unmatched
// one; then it lowers the duals of the columns it went through and flips the path.
//
// Most columns are never near. So each row has a short list of its nearest columns, in order, and a bound: w is no less
// in columns that are not listed. Duals only fall and w only rises, so lists and bounds stay true from below, also in
// floating point, where subtraction is monotone. A search reads lists; it reads a whole row only where no column is
// nearer than the row's bound. What it finds does not depend on the lists: of equally near columns an unmatched one
// comes first, then the one with the lower index; of equally long ways to a column, the one by the row scanned first.

constexpr std::int64_t tile = 64;  // columns, of which the smallest values are known; arrays are padded to whole tiles

// Solves one problem after another in the same memory.
template <class T>
class Assigner {
   public:
    void solve(const Problem& problem, Assignment& result) {
        begin(problem, result);
        if (!match_nearest(problem.start != nullptr)) return;
        for (std::int64_t i = 0; i < rows_; ++i) {
            if (lists_fail()) return row_assigner_.finish(problem, v_.data(), result);
            if (columns_[i] < 0 && !search(static_cast<std::int32_t>(i))) {
                result.fault = Fault::infeasible;
                result.row = i;
                return;
            }
        }
        if (problem.u != nullptr) certify(problem, result);
    }

   private:
    // A list takes what is no further than the `near_lanes`-th smallest of the minima of a tile's lanes: somewhat more
    // columns than that, and at most `capacity`.
    static constexpr std::int64_t near_lanes = 16, capacity = 32;
    // A list that lacks a column is made anew if it was scanned more often than its patience, which starts afresh
    // unless the list lacked a column in more than a quarter of its scans: then it doubles.
    static constexpr std::int32_t patience = 2, most_patience = 256;

    struct Near {
        double w;  // when the list was made; in ascending order
        T value;
        std::int32_t column;
    };
    struct List {
        double bound = infinity;
        std::int32_t size = -1;  // before it is made
        std::int32_t scans = 0, fails = 0, patience = Assigner::patience;
    };
    // A row that was scanned by its list, and how near the columns may be that its list lacks.
    struct Bound {
        double distance;
        std::int32_t order;
        bool operator<(const Bound& other) const { return distance > other.distance; }  // the nearest is a heap's first
    };
    // The nearest unmatched column.
    struct Sink {
        double distance;
        std::int32_t column, order;
        bool operator<(const Sink& other) const {
            return std::tie(distance, column, order) < std::tie(other.distance, other.column, other.order);
        }
    };

    // Whether so many scans went beyond their lists that it is faster to have none. (A scan that does costs about three
    // of a RowAssigner's.)
    bool lists_fail() const { return scans_ >= 1024 && whole_scans_ > scans_ / 3; }

    const T* row(std::int64_t i) const { return matrix_ + i * cols_; }
    double cost(T value) const { return static_cast<double>(sign_ * value); }

    void begin(const Problem& problem, Assignment& result) {
        matrix_ = reinterpret_cast<const T*>(problem.matrix.address);
        rows_ = problem.rows;
        cols_ = problem.cols;
        sign_ = problem.maximize ? T(-1) : T(1);
        result_ = &result;
        columns_ = problem.columns;
        std::fill_n(columns_, rows_, -1);
        const std::int64_t padded = (cols_ + tile - 1) / tile * tile;
        w_.assign(padded, infinity);
        v_.assign(cols_, 0.0);
        if (problem.start != nullptr) std::copy_n(problem.start, cols_, v_.begin());
        owner_.assign(cols_, -1);
        value_.resize(cols_);
        matched_.assign(padded, 0.0);
        std::fill(matched_.begin() + cols_, matched_.end(), infinity);
        near_.resize(rows_ * capacity);
        lists_.assign(rows_, {});
        listed_.resize(padded);
        distance_.assign(padded, -infinity);
        open_.assign(padded, infinity);
        tiles_.assign((padded / tile + 15) / 16 * 16, infinity);
        from_.assign(padded, 0);
        scans_ = whole_scans_ = 0;
    }

    void match(std::int32_t i, std::int32_t j) {
        owner_[j] = i;
        value_[j] = row(i)[j];
        columns_[i] = j;
        matched_[j] = infinity;
        distance_[j] = infinity;
    }

    // Match each row with its nearest column where that is still unmatched: the whole answer where the nearest columns
    // are distinct. Returns whether all values may be used.
    bool match_nearest(bool started) {
        for (std::int64_t i = 0; i < rows_; ++i) {
            const T* x = row(i);
            T low;
            if (!lowest_cost(x, low)) return false;
            if (low == std::numeric_limits<T>::infinity()) continue;
            std::int64_t j;
            if (started) {
                reduce(i);
                j = first_at_most(w_.data(), smallest(w_.data(), w_.size()));
            } else {
                j = std::find(x, x + cols_, sign_ * low) - x;
            }
            if (owner_[j] < 0) match(static_cast<std::int32_t>(i), static_cast<std::int32_t>(j));
        }
        return true;
    }

    // The smallest cost of a row, or a fault: NaN, or minus infinity.
    bool lowest_cost(const T* x, T& low) {
        constexpr std::int64_t width = register_bytes / sizeof(T);
        Lanes<T> lows = Lanes<T>{} + std::numeric_limits<T>::infinity();
        auto ordered = lows == lows;
        std::int64_t j = 0;
        for (; j + width <= cols_; j += width) {
            const Lanes<T> c = load(x + j) * sign_;
            lows = c < lows ? c : lows;
            ordered &= c == c;
        }
        low = smallest_lane<T>(lows);
        bool valid = true;
        for (std::int64_t l = 0; l < width; ++l) valid &= ordered[l] != 0;
        for (; j < cols_; ++j) {
            const T c = sign_ * x[j];
            low = c < low ? c : low;
            valid &= c == c;
        }
        if (valid && low > -std::numeric_limits<T>::infinity()) return true;
        const T* bad =
            std::find_if(x, x + cols_, [&](T value) { return !(sign_ * value > -std::numeric_limits<T>::infinity()); });
        result_->fault = *bad == *bad ? Fault::unbounded : Fault::nan;
        result_->row = (x - matrix_) / cols_;
        result_->column = bad - x;
        return false;
    }

    // w of a row, and its smallest values by lane of a tile.
    void reduce(std::int64_t i) {
        const T* x = row(i);
        const double* v = v_.data();
        double* __restrict__ w = w_.data();
        double* __restrict__ low = low_;
        const T sign = sign_;
        std::fill_n(low, tile, infinity);
        const std::int64_t whole = cols_ / tile * tile;
        for (std::int64_t first = 0; first < whole; first += tile)
            for (std::int64_t l = 0; l < tile; ++l) {
                const double reduced = static_cast<double>(sign * x[first + l]) - v[first + l];
                w[first + l] = reduced;
                low[l] = reduced < low[l] ? reduced : low[l];
            }
        for (std::int64_t l = 0; whole + l < cols_; ++l) {
            w[whole + l] = cost(x[whole + l]) - v[whole + l];
            low[l] = std::min(low[l], w[whole + l]);
        }
    }

    // A row's list, from what `reduce` has left.
    void make_list(std::int64_t i) {
        std::nth_element(low_, low_ + near_lanes - 1, low_ + tile);
        double bound = low_[near_lanes - 1];
        const double limit = std::min(bound, std::numeric_limits<double>::max());
        std::int64_t size = 0;
        for (std::size_t first = 0; first < w_.size(); first += 8)
            for (unsigned bits = at_most(&w_[first], limit); bits != 0; bits &= bits - 1) {
                const std::size_t j = first + __builtin_ctz(bits);
                listed_[size++] = {w_[j], T{}, static_cast<std::int32_t>(j)};
            }
        const auto nearer = [](const Near& a, const Near& b) { return a.w < b.w; };
        if (size > capacity) {
            std::nth_element(listed_.begin(), listed_.begin() + capacity, listed_.begin() + size, nearer);
            bound = listed_[capacity].w;
            size = capacity;
        }
        std::sort(listed_.begin(), listed_.begin() + size, nearer);
        for (std::int64_t k = 0; k < size; ++k) {
            listed_[k].value = row(i)[listed_[k].column];
            near_[i * capacity + k] = listed_[k];
        }
        List& list = lists_[i];
        list.patience = list.scans >= 4 * list.fails ? patience : std::min(2 * list.patience, most_patience);
        list.bound = bound;
        list.size = static_cast<std::int32_t>(size);
        list.scans = list.fails = 0;
    }

    // Match an unmatched row; returns false where no column is left to it.
    bool search(std::int32_t root) {
        scanned_.clear();
        bounds_.clear();
        closed_.clear();
        sink_ = {infinity, 0, 0};
        scan(root, 0.0);
        for (;;) {
            const double lowest = smallest(tiles_.data(), tiles_.size());
            if (!bounds_.empty() && bounds_.front().distance <= std::min(lowest, sink_.distance)) {
                const std::int32_t order = bounds_.front().order;
                std::pop_heap(bounds_.begin(), bounds_.end());
                bounds_.pop_back();
                scan_whole(order);
                continue;
            }
            if (sink_.distance <= lowest) break;
            const std::int64_t t = first_at_most(tiles_.data(), lowest);
            const std::int64_t j = t * tile + first_at_most(&open_[t * tile], lowest);
            open_[j] = infinity;
            distance_[j] = -infinity;
            tiles_[t] = smallest(&open_[t * tile], tile);
            closed_.push_back({lowest, static_cast<std::int32_t>(j)});
            scan(owner_[j], lowest - (cost(value_[j]) - v_[j]));
        }
        const bool found = sink_.distance < infinity;
        if (found) flip(root);
        forget();
        return found;
    }

    // Reach columns from a row, by its list: column j at the distance offset + w(j).
    void scan(std::int32_t i, double offset) {
        const auto order = static_cast<std::int32_t>(scanned_.size());
        scanned_.push_back({offset, i});
        List& list = lists_[i];
        if (list.size < 0) {
            reduce(i);
            make_list(i);
        }
        ++list.scans;
        ++scans_;
        const Near* entry = &near_[i * capacity];
        for (const Near* end = entry + list.size; entry != end; ++entry) {
            if (offset + entry->w > sink_.distance) return;
            reach(entry->column, offset + (cost(entry->value) - v_[entry->column]), order);
        }
        const double distance = offset + list.bound;
        if (distance < infinity && distance <= sink_.distance) {
            bounds_.push_back({distance, order});
            std::push_heap(bounds_.begin(), bounds_.end());
        }
    }

    void reach(std::int32_t j, double distance, std::int32_t order) {
        if (owner_[j] < 0) {
            sink_ = std::min(sink_, {distance, j, order});
            return;
        }
        double& known = distance_[j];
        // A column no nearer than the nearest unmatched one is never scanned.
        if (distance >= sink_.distance || distance > known || (distance == known && order >= from_[j])) return;
        if (known == infinity) reached_.push_back(j);
        known = open_[j] = distance;
        from_[j] = order;
        tiles_[j / tile] = std::min(tiles_[j / tile], distance);
    }

    // Reach all columns from a row that was scanned by its list.
    void scan_whole(std::int32_t order) {
        const auto [offset, i] = scanned_[order];
        reduce(i);
        ++lists_[i].fails;
        ++whole_scans_;
        if (lists_[i].scans > lists_[i].patience) make_list(i);
        all_reached_ = true;
        const double* w = w_.data();
        const double* matched = matched_.data();
        const double* known = distance_.data();
        constexpr std::int64_t width = register_bytes / sizeof(double);
        Lanes<double> unmatched = Lanes<double>{} + infinity;
        const bool latest = order + 1 == static_cast<std::int32_t>(scanned_.size());  // then no way by it comes first
        for (std::size_t first = 0; first < w_.size(); first += tile) {
            auto any = unmatched < unmatched;
            for (std::size_t j = first; j < first + tile; j += width) {
                const Lanes<double> distance = load(w + j) + offset, before = load(known + j);
                const Lanes<double> to_unmatched = distance + load(matched + j);
                unmatched = to_unmatched < unmatched ? to_unmatched : unmatched;
                any |= latest ? distance < before : distance <= before;
            }
            bool nearer = false;
            for (std::int64_t l = 0; l < width; ++l) nearer |= any[l] != 0;
            if (nearer) reach_tile(first, offset, order);
        }
        const double nearest = smallest_lane<double>(unmatched);
        if (nearest < infinity && nearest <= sink_.distance)
            for (std::int32_t j = 0;; ++j)
                if (owner_[j] < 0 && offset + w[j] == nearest) {
                    sink_ = std::min(sink_, {nearest, j, order});
                    break;
                }
    }

    void reach_tile(std::size_t first, double offset, std::int32_t order) {
        const double* __restrict__ w = &w_[first];
        double* __restrict__ known = &distance_[first];
        double* __restrict__ open = &open_[first];
        std::int32_t* __restrict__ from = &from_[first];
        for (std::int64_t j = 0; j < tile; ++j) {
            const double distance = offset + w[j];
            const bool nearer = (distance < known[j]) | ((distance == known[j]) & (order < from[j]));
            known[j] = nearer ? distance : known[j];
            open[j] = nearer ? distance : open[j];
            from[j] = nearer ? order : from[j];
        }
        tiles_[first / tile] = smallest(open, tile);
    }

    // Lower the duals of the columns gone through, and match every row of the path with its next column.
    void flip(std::int32_t root) {
        for (const auto& [distance, j] : closed_) v_[j] -= sink_.distance - distance;
        for (std::int32_t j = sink_.column, order = sink_.order;; order = from_[j]) {
            const std::int32_t i = scanned_[order].second;
            const auto next = static_cast<std::int32_t>(columns_[i]);
            match(i, j);
            if (i == root) break;
            j = next;
        }
    }

    void forget() {
        if (all_reached_) {
            for (std::size_t j = 0; j < distance_.size(); ++j) distance_[j] = matched_[j] == 0 ? -infinity : infinity;
            std::fill(open_.begin(), open_.end(), infinity);
            std::fill(tiles_.begin(), tiles_.end(), infinity);
        } else {
            for (const std::int32_t j : reached_) {
                distance_[j] = open_[j] = infinity;
                tiles_[j / tile] = infinity;
            }
        }
        reached_.clear();
        all_reached_ = false;
    }

    // The duals, exactly feasible but for rounding: those of rows are as large as those of columns let them be.
    void certify(const Problem& problem, Assignment& result) {
        for (std::int64_t i = 0; i < rows_; ++i) {
            reduce(i);
            problem.u[i] = *std::min_element(low_, low_ + tile);
            result.primal += cost(row(i)[columns_[i]]);
            result.dual += problem.u[i];
        }
        for (const double v : v_) result.dual += v;
        std::copy(v_.begin(), v_.end(), problem.v);
    }

    const T* matrix_ = nullptr;
    std::int64_t rows_ = 0, cols_ = 0;
    T sign_ = 1;
    std::int64_t* columns_ = nullptr;  // of each row, or -1
    Assignment* result_ = nullptr;

    std::vector<double> w_;  // of one row
    double low_[tile];
    std::vector<double> v_;
    std::vector<std::int32_t> owner_;  // the row that a column is matched with, or -1
    std::vector<T> value_;             // there
    std::vector<double> matched_;      // 0 for unmatched columns, infinity for others
    std::vector<Near> near_;           // [row][capacity]
    std::vector<List> lists_;
    std::vector<Near> listed_;
    std::int64_t scans_ = 0, whole_scans_ = 0;  // of all rows, and those of them that went beyond the list
    RowAssigner<T> row_assigner_;               // for a problem whose lists fail

    // Of one search.
    std::vector<std::pair<double, std::int32_t>> scanned_;  // offsets and rows, in order
    std::vector<Bound> bounds_;
    Sink sink_;
    std::vector<double> distance_;       // of matched columns; minus infinity for those gone through and unmatched ones
    std::vector<double> open_;           // the same for columns that were reached and not gone through; else infinity
    std::vector<double> tiles_;          // the smallest of those, by tile
    std::vector<std::int32_t> from_;     // the order of the row that a column was reached from
    std::vector<std::int32_t> reached_;  // columns; unless `all_reached_` stands for them
    std::vector<std::pair<double, std::int32_t>> closed_;  // the distances of columns gone through
    bool all_reached_ = false;
};

inline void assign(const std::vector<Problem>& problems, const std::function<std::size_t()>& next,
                   std::vector<Assignment>& results) {
    std::tuple<Assigner<float>, RowAssigner<float>> singles;
    std::tuple<Assigner<double>, RowAssigner<double>> doubles;
    for (std::size_t k; (k = next()) < problems.size();) {
        const Problem& problem = problems[k];
        const auto solve = [&](auto& assigners) {
            if (problem.cols <= most_copied)
                std::get<1>(assigners).solve(problem, results[k]);
            else
                std::get<0>(assigners).solve(problem, results[k]);
        };
        problem.matrix.dtype == Dtype::f64 ? solve(doubles) : solve(singles);
    }
}
