// Linear assignment of few columns.
//
// Included after minima.inl. The search of assign.inl, on a copy of the costs in float64 that stays in the nearest
// caches: there reading a whole row costs less than keeping a list of its nearest columns.

constexpr std::int64_t most_narrow = 256;  // columns

// Solves one problem after another in the same memory.
class NarrowAssigner {
   public:
    template <class T>
    void solve(const Problem& problem, Assignment& result) {
        begin(problem);
        if (!read(reinterpret_cast<const T*>(problem.matrix.address), problem.maximize ? T(-1) : T(1), result)) return;
        match_nearest();
        for (std::int64_t i = 0; i < rows_; ++i)
            if (columns_[i] < 0 && !search(i)) {
                result.fault = Fault::infeasible;
                result.row = i;
                return;
            }
        if (problem.u != nullptr) certify(problem, result);
    }

   private:
    static constexpr std::int64_t width = register_bytes / sizeof(double);

    // A column gone through, whose dual is minus infinity until the search ends: so it is not reached again.
    struct Closed {
        double distance, dual;
        std::int64_t column;
    };

    const double* row(std::int64_t i) const { return &costs_[i * padded_]; }

    void begin(const Problem& problem) {
        rows_ = problem.rows;
        cols_ = problem.cols;
        padded_ = (cols_ + 15) / 16 * 16;
        columns_ = problem.columns;
        started_ = problem.start != nullptr;
        if (costs_.size() < static_cast<std::size_t>(rows_ * padded_)) costs_.resize(rows_ * padded_);
        std::fill_n(columns_, rows_, -1);
        std::fill_n(v_, padded_, 0.0);
        if (started_) std::copy_n(problem.start, cols_, v_);
        std::fill_n(unmatched_, padded_ / 8, 0xff);
    }

    // Copy the costs, padded with infinity; returns false where one is a fault, NaN or minus infinity.
    template <class T>
    bool read(const T* x, T sign, Assignment& result) {
        for (std::int64_t i = 0; i < rows_; ++i, x += cols_) {
            double* to = &costs_[i * padded_];
            bool valid = true;
            for (std::int64_t j = 0; j < cols_; ++j) {
                to[j] = static_cast<double>(sign * x[j]);
                valid &= to[j] > -infinity;
            }
            std::fill(to + cols_, to + padded_, infinity);
            if (!valid) {
                result.row = i;
                result.column = std::find_if(to, to + cols_, [](double c) { return !(c > -infinity); }) - to;
                result.fault = to[result.column] == -infinity ? Fault::unbounded : Fault::nan;
                return false;
            }
        }
        return true;
    }

    void match(std::int64_t i, std::int64_t j) {
        owner_[j] = i;
        columns_[i] = j;
        unmatched_[j / 8] &= ~(1u << j % 8);
    }

    // Match each row with its nearest column where that is still unmatched.
    void match_nearest() {
        for (std::int64_t i = 0; i < rows_; ++i) {
            const double* w = row(i);
            if (started_) {
                for (std::int64_t j = 0; j < padded_; ++j) open_[j] = w[j] - v_[j];
                w = open_;
            }
            const double low = smallest(w, padded_);
            if (low == infinity) continue;
            const std::int64_t j = first_at_most(w, low);
            if (unmatched_[j / 8] >> j % 8 & 1) match(i, j);
        }
    }

    // Match an unmatched row; returns false where no column is left to it.
    bool search(std::int64_t root) {
        std::fill_n(open_, padded_, infinity);
        closed_.clear();
        double distance = 0;
        std::int64_t sink;
        for (std::int64_t i = root;;) {
            const double nearest = scan(i, i == root ? 0.0 : distance - (row(i)[columns_[i]] - closed_.back().dual));
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
        Lanes<double> low = Lanes<double>{} + infinity;
        for (std::int64_t j = 0; j < padded_; j += width) {
            const Lanes<double> distance = offset + (load(c + j) - load(v_ + j)), known = load(open_ + j);
            const auto nearer = distance < known;
            const Lanes<double> open = nearer ? distance : known;
            const Lanes<std::int64_t> from = nearer ? Lanes<std::int64_t>{} + i : load(from_ + j);
            std::memcpy(open_ + j, &open, sizeof open);
            std::memcpy(from_ + j, &from, sizeof from);
            low = open < low ? open : low;
        }
        return smallest_lane<double>(low);
    }

    // Of the open columns at a distance the first unmatched one, or the first; and whether it is unmatched.
    std::pair<std::int64_t, bool> nearest_column(double distance) const {
        std::int64_t first = -1;
        for (std::int64_t j = 0; j < padded_; j += 8) {
            const unsigned bits = at_most(open_ + j, distance);
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
            problem.u[i] = smallest(open_, padded_);
            result.primal += c[columns_[i]];
            result.dual += problem.u[i];
        }
        for (std::int64_t j = 0; j < cols_; ++j) result.dual += v_[j];
        std::copy_n(v_, cols_, problem.v);
    }

    std::int64_t rows_ = 0, cols_ = 0, padded_ = 0;
    bool started_ = false;
    std::int64_t* columns_ = nullptr;  // of each row, or -1
    std::vector<double> costs_;        // [row][padded column]

    alignas(line) double v_[most_narrow];
    std::int64_t owner_[most_narrow];          // the row that a matched column is matched with
    std::uint8_t unmatched_[most_narrow / 8];  // a bit for each column

    // Of one search.
    alignas(line) double open_[most_narrow];             // distances of columns that were reached and not gone through
    alignas(line) std::int64_t from_[most_narrow] = {};  // the row that a column was reached from
    std::vector<Closed> closed_;
};
