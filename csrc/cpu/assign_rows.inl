// Linear assignment that reads whole rows.
//
// Included after minima.inl. The search of assign.inl without lists of near columns: for problems of few columns, whose
// costs are copied in float64 and stay in the near caches, and for those whose lists do not serve.

constexpr std::int64_t most_copied = 256;  // columns

// Solves one problem after another in the same memory.
template <class T>
class RowAssigner {
   public:
    void solve(const Problem& problem, Assignment& result) {
        begin(problem);
        std::fill_n(columns_, rows_, -1);
        if (!copy(result)) return;
        match_nearest(problem.start != nullptr);
        search_all(problem, result);
    }

    // Go on from where some rows are matched, with these duals of the columns.
    void finish(const Problem& problem, const double* v, Assignment& result) {
        begin(problem);
        std::copy_n(v, cols_, v_.begin());
        for (std::int64_t i = 0; i < rows_; ++i)
            if (columns_[i] >= 0) match(i, columns_[i]);
        search_all(problem, result);
    }

   private:
    static constexpr std::int64_t width = register_bytes / sizeof(double);

    // A column gone through, whose dual is minus infinity until the search ends: so it is not reached again.
    struct Closed {
        double distance, dual;
        std::int64_t column;
    };

    double cost(T value) const { return static_cast<double>(sign_ * value); }
    double cost(std::int64_t i, std::int64_t j) const { return cost(matrix_[i * cols_ + j]); }

    void begin(const Problem& problem) {
        matrix_ = reinterpret_cast<const T*>(problem.matrix.address);
        rows_ = problem.rows;
        cols_ = problem.cols;
        sign_ = problem.maximize ? T(-1) : T(1);
        columns_ = problem.columns;
        padded_ = (cols_ + 15) / 16 * 16;
        copied_ = false;
        costs_.resize(std::max<std::size_t>(costs_.size(), padded_));
        v_.assign(padded_, 0.0);
        if (problem.start != nullptr) std::copy_n(problem.start, cols_, v_.begin());
        owner_.resize(padded_);
        unmatched_.assign(padded_ / 8, 0xff);
        open_.resize(padded_);
        from_.resize(padded_);
    }

    // A row in float64, padded with infinity.
    double* convert(std::int64_t i, double* to) const {
        const T* x = matrix_ + i * cols_;
        for (std::int64_t j = 0; j < cols_; ++j) to[j] = cost(x[j]);
        std::fill(to + cols_, to + padded_, infinity);
        return to;
    }

    const double* row(std::int64_t i) { return copied_ ? &costs_[i * padded_] : convert(i, costs_.data()); }

    // Copy all costs; returns false where one is a fault, NaN or minus infinity.
    bool copy(Assignment& result) {
        copied_ = true;
        costs_.resize(std::max<std::size_t>(costs_.size(), rows_ * padded_));
        for (std::int64_t i = 0; i < rows_; ++i) {
            const double* c = convert(i, &costs_[i * padded_]);
            bool valid = true;
            for (std::int64_t j = 0; j < padded_; ++j) valid &= c[j] > -infinity;
            if (valid) continue;
            const double* bad = std::find_if(c, c + cols_, [](double x) { return !(x > -infinity); });
            result.fault = *bad == *bad ? Fault::unbounded : Fault::nan;
            result.row = i;
            result.column = bad - c;
            return false;
        }
        return true;
    }

    void match(std::int64_t i, std::int64_t j) {
        owner_[j] = i;
        columns_[i] = j;
        unmatched_[j / 8] &= ~(1u << j % 8);
    }

    // Match each row with its nearest column where that is still unmatched.
    void match_nearest(bool started) {
        for (std::int64_t i = 0; i < rows_; ++i) {
            const double* w = row(i);
            if (started) {
                for (std::int64_t j = 0; j < padded_; ++j) open_[j] = w[j] - v_[j];
                w = open_.data();
            }
            const double low = smallest(w, padded_);
            if (low == infinity) continue;
            const std::int64_t j = first_at_most(w, low);
            if (unmatched_[j / 8] >> j % 8 & 1) match(i, j);
        }
    }

    // Match all rows that are not matched, in order.
    void search_all(const Problem& problem, Assignment& result) {
        for (std::int64_t i = 0; i < rows_; ++i)
            if (columns_[i] < 0 && !search(i)) {
                result.fault = Fault::infeasible;
                result.row = i;
                return;
            }
        if (problem.u != nullptr) certify(problem, result);
    }

    // Match an unmatched row; returns false where no column is left to it.
    bool search(std::int64_t root) {
        std::fill(open_.begin(), open_.end(), infinity);
        closed_.clear();
        double distance = 0;
        std::int64_t sink;
        for (std::int64_t i = root;;) {
            const double nearest = scan(i, i == root ? 0.0 : distance - (cost(i, columns_[i]) - closed_.back().dual));
            if (nearest == infinity) return false;
            distance = nearest;
            bool ends;
            std::tie(sink, ends) = nearest_column(distance);
            if (ends) break;
            closed_.push_back({distance, v_[sink], sink});
            open_[sink] = infinity;
            v_[sink] = -infinity;
            i = owner_[sink];
        }
        for (const Closed& c : closed_) v_[c.column] = c.dual - (distance - c.distance);
        for (std::int64_t j = sink;;) {
            const std::int64_t i = from_[j], next = columns_[i];
            match(i, j);
            if (i == root) break;
            j = next;
        }
        return true;
    }

    // Reach columns from a row: column j at the distance offset + w(j). Returns how far the nearest open one is.
    double scan(std::int64_t i, double offset) {
        const double* c = row(i);
        const double* v = v_.data();
        double* open = open_.data();
        std::int64_t* from = from_.data();
        Lanes<double> low = Lanes<double>{} + infinity;
        for (std::int64_t j = 0; j < padded_; j += width) {
            const Lanes<double> distance = offset + (load(c + j) - load(v + j)), before = load(open + j);
            const auto nearer = distance < before;
            const Lanes<double> least = nearer ? distance : before;
            const Lanes<std::int64_t> through = nearer ? Lanes<std::int64_t>{} + i : load(from + j);
            std::memcpy(open + j, &least, sizeof least);
            std::memcpy(from + j, &through, sizeof through);
            low = least < low ? least : low;
        }
        return smallest_lane<double>(low);
    }

    // Of the open columns at a distance the first unmatched one, or the first; and whether it is unmatched.
    std::pair<std::int64_t, bool> nearest_column(double distance) const {
        std::int64_t first = -1;
        for (std::int64_t j = 0; j < padded_; j += 8) {
            const unsigned bits = at_most(&open_[j], distance);
            if (bits == 0) continue;
            if (const unsigned unmatched = bits & unmatched_[j / 8]) return {j + __builtin_ctz(unmatched), true};
            if (first < 0) first = j + __builtin_ctz(bits);
        }
        return {first, false};
    }

    // The duals, exactly feasible but for rounding: those of rows are as large as those of columns let them be.
    void certify(const Problem& problem, Assignment& result) {
        for (std::int64_t i = 0; i < rows_; ++i) {
            const double* c = row(i);
            for (std::int64_t j = 0; j < padded_; ++j) open_[j] = c[j] - v_[j];
            problem.u[i] = smallest(open_.data(), padded_);
            result.primal += c[columns_[i]];
            result.dual += problem.u[i];
        }
        for (std::int64_t j = 0; j < cols_; ++j) result.dual += v_[j];
        std::copy_n(v_.begin(), cols_, problem.v);
    }

    const T* matrix_ = nullptr;
    std::int64_t rows_ = 0, cols_ = 0, padded_ = 0;
    T sign_ = 1;
    std::int64_t* columns_ = nullptr;  // of each row, or -1

    bool copied_ = false;
    std::vector<double> costs_;  // [row][padded column] if copied, else of one row
    std::vector<double> v_;
    std::vector<std::int64_t> owner_;      // the row that a matched column is matched with
    std::vector<std::uint8_t> unmatched_;  // a bit for each column

    // Of one search.
    std::vector<double> open_;        // distances of columns that were reached and not gone through; else infinity
    std::vector<std::int64_t> from_;  // the row that a column was reached from
    std::vector<Closed> closed_;
};
