// The consensus of task vectors: trimmed, elected by sign, and merged into the base, chunk by chunk.
//
// Included after tasks.inl.

// The bits of the sign of a vote, `zero` being those of a vote that cancelled.
template <class C>
Key<C> elected(C vote, Key<C> zero) {
    return vote == 0 ? zero : bit_cast<Key<C>>(vote) & ~highest<C>;
}

// votes += the signs, or the scaled values, of the task vectors; `present` collects the bits of what voted.
template <bool Frequency, class C, std::size_t... K>
void vote(C* votes, Key<C>* present, C* const* t, const C* scale, std::int64_t n, std::index_sequence<K...>) {
    const C* const in[] = {t[K]...};
    const C s[] = {scale[K]...};
#pragma GCC ivdep
    for (std::int64_t i = 0; i < n; ++i) {
        C sum = votes[i];
        Key<C> bits = present[i];
        const auto add = [&](std::size_t k) {
            const C term = rules::scaled(s[k], in[k][i]);
            bits |= magnitude(term);
            // NaN has no sign: it stays what it is.
            if constexpr (Frequency)
                sum += term > 0 ? C{1} : term < 0 ? C{-1} : term;
            else
                sum += term;
        };
        (add(K), ...);
        votes[i] = sum;
        present[i] = bits;
    }
}

// Fold the weighted task vectors that agree with the elected sign, or all of them, into `merged`, and what they add to
// the divisor of a mean into `divisors`.
template <bool Voted, MergeFunc Func, class C, std::size_t... K>
void merge(C* merged, C* divisors, const C* votes, Key<C> zero, C* const* t, const C* scale, const C* weight,
           const C* divisor, std::int64_t n, std::index_sequence<K...>) {
    const C* const in[] = {t[K]...};
    const C s[] = {scale[K]...}, w[] = {weight[K]...}, d[] = {divisor[K]...};
#pragma GCC ivdep
    for (std::int64_t i = 0; i < n; ++i) {
        const Key<C> sign = Voted ? elected(votes[i], zero) : 0;
        C sum = merged[i], count = Func == MergeFunc::mean ? divisors[i] : C{};
        const auto add = [&](std::size_t k) {
            const C voting = Voted ? bit_cast<C>(bit_cast<Key<C>>(rules::scaled(s[k], in[k][i])) ^ sign) : in[k][i];
            const Key<C> agrees = -Key<C>(Voted ? voting > 0 : voting != 0);
            const C term = rules::scaled(w[k], in[k][i]);
            if constexpr (Func == MergeFunc::max) {
                const C candidate = Voted ? bit_cast<C>(magnitude(term) | sign) : term;
                sum = agrees & -Key<C>(magnitude(term) > magnitude(sum)) ? candidate : sum;
            } else {
                sum += masked(term, agrees);
            }
            if constexpr (Func == MergeFunc::mean) count += masked(d[k], agrees);
        };
        (add(K), ...);
        merged[i] = sum;
        if constexpr (Func == MergeFunc::mean) divisors[i] = count;
    }
}

// Divide by the divisor, scale, and add to the base.
template <bool Based, bool Voted, bool Mean, class S, class C>
void finish(C* result, const S* base, const C* merged, const C* divisors, const C* votes, bool cancel, C scaling,
            std::int64_t n) {
#pragma GCC ivdep
    for (std::int64_t i = 0; i < n; ++i) {
        const C b = Based ? widen<C>(base[i]) : C{};
        C m = merged[i];
        if constexpr (Mean) m = m / (divisors[i] == 0 ? C{1} : divisors[i]);
        if constexpr (Voted) m = cancel & (votes[i] == 0) ? C{} : m;
        const C out = rules::applied(b, scaling, m);
        result[i] = Voted && votes[i] != votes[i] ? votes[i] : out;
    }
}

template <class S, class C>
class Consensus {
   public:
    Consensus(const Range& range, const Plan& plan, std::size_t row, int zero, Tally& tally)
        : survivors_(range, plan, row),
          plan_(plan),
          tally_(tally),
          models_(survivors_.tasks.models()),
          zero_(zero < 0 ? ~highest<C> : 0),
          cancel_(zero == 0),
          scaling_(static_cast<C>(plan.scaling[row])),
          weights_(models_),
          divisors_(models_),
          scale_(models_, C{1}) {
        for (std::size_t k = 0; k < models_; ++k) {
            weights_[k] = static_cast<C>(plan.weights[row * models_ + k]);
            divisors_[k] = static_cast<C>(plan.divisors[row * models_ + k]);
            if (plan.vote == Vote::weighted_total) scale_[k] = weights_[k];
        }
    }

    void operator()(std::int64_t begin, std::int64_t n, C* result) {
        survivors_.load(begin, n);

        C* const* t = survivors_.tasks.t.data();
        std::fill_n(rows_[merged], n, C{});
        const bool mean = plan_.merge == MergeFunc::mean, voted = plan_.vote != Vote::none;
        if (mean) std::fill_n(rows_[divided], n, C{});
        if (voted) {
            std::fill_n(rows_[voting], n, C{});
            std::fill_n(present_, n, Key<C>{});
        }
        by_fours(models_, [&](std::size_t k, auto models) {
            if (plan_.vote == Vote::frequency)
                vote<true>(rows_[voting], present_, t + k, &scale_[k], n, models);
            else if (voted)
                vote<false>(rows_[voting], present_, t + k, &scale_[k], n, models);
        });
        count(begin, n);
        by_fours(models_, [&](std::size_t k, auto models) {
            const auto fold = [&](auto has_vote, auto func) {
                merge<has_vote, func>(rows_[merged], rows_[divided], rows_[voting], zero_, t + k, &scale_[k],
                                      &weights_[k], &divisors_[k], n, models);
            };
            const auto with = [&](auto has_vote) {
                switch (plan_.merge) {
                    case MergeFunc::sum: return fold(has_vote, std::integral_constant<MergeFunc, MergeFunc::sum>{});
                    case MergeFunc::mean: return fold(has_vote, std::integral_constant<MergeFunc, MergeFunc::mean>{});
                    case MergeFunc::max: return fold(has_vote, std::integral_constant<MergeFunc, MergeFunc::max>{});
                }
            };
            if (voted)
                with(std::true_type{});
            else
                with(std::false_type{});
        });
        const auto end = [&](auto based, auto has_vote, auto divides) {
            finish<based, has_vote, divides>(result, survivors_.tasks.base(), rows_[merged], rows_[divided],
                                             rows_[voting], cancel_, scaling_, n);
        };
        const auto by_mean = [&](auto based, auto has_vote) {
            if (mean)
                end(based, has_vote, std::true_type{});
            else
                end(based, has_vote, std::false_type{});
        };
        const auto by_vote = [&](auto based) {
            if (voted)
                by_mean(based, std::true_type{});
            else
                by_mean(based, std::false_type{});
        };
        if (plan_.based)
            by_vote(std::true_type{});
        else
            by_vote(std::false_type{});
    }

   private:
    // Count the votes of a chunk, and whatever a report asks for.
    void count(std::int64_t begin, std::int64_t n) {
        if (plan_.vote != Vote::none && (tally_.to_revise != nullptr || tally_.kept != nullptr)) {
            const C* votes = rows_[voting];
            std::int32_t positive = 0, negative = 0, cancelled = 0;
            for (std::int64_t i = 0; i < n; ++i) {
                positive += votes[i] > 0;
                negative += votes[i] < 0;
                cancelled += (votes[i] == 0) & (present_[i] != 0);
            }
            tally_.positive += positive;
            tally_.negative += negative;
            tally_.cancelled += cancelled;
            if (cancelled > 0 && tally_.to_revise != nullptr) tally_.to_revise->emplace_back(begin, begin + n);
        }
        if (tally_.kept == nullptr) return;
        std::uint8_t up[chunk] = {}, down[chunk] = {};
        for (std::size_t k = 0; k < models_; ++k) {
            const C* t = survivors_.tasks.t[k];
            std::int64_t kept = 0;
            for (std::int64_t i = 0; i < n; ++i) {
                kept += t[i] != 0;
                up[i] |= t[i] > 0;
                down[i] |= t[i] < 0;
            }
            tally_.kept[k] += kept;
        }
        for (std::int64_t i = 0; i < n; ++i) tally_.conflicts += up[i] & down[i];
    }

    enum { merged, divided, voting };
    Survivors<S, C> survivors_;
    const Plan& plan_;
    Tally& tally_;
    std::size_t models_;
    Key<C> zero_;
    bool cancel_;
    C scaling_;
    std::vector<C> weights_, divisors_, scale_;
    Rows<C> rows_{3};
    alignas(line) Key<C> present_[chunk];
};

// Call `body` with values of the types that task vectors are read as and computed in.
template <class Body>
void with_task_types(const Range& range, Body body) {
    bool is_double = false, all_bf16 = true;
    for (std::size_t k = 0; k < range.width; ++k) {
        is_double |= range.inputs[k].dtype == Dtype::f64;
        all_bf16 &= range.inputs[k].dtype == Dtype::bf16;
    }
    if (is_double)
        body(double{}, double{});
    else if (all_bf16)
        body(bf16{}, float{});
    else
        body(float{}, float{});
}

inline void consensus(const Range& range, const Plan& plan, std::size_t row, int zero, Tally& tally) {
    with_task_types(range, [&](auto stored, auto computed) {
        using C = decltype(computed);
        Consensus<decltype(stored), C> rule(range, plan, row, zero, tally);
        if (range.output.address != 0)
            return for_chunks<C>(range, [&](std::int64_t begin, std::int64_t n, C* out) { rule(begin, n, out); });
        alignas(line) C unwritten[chunk];
        for (std::int64_t begin = range.begin; begin < range.end; begin += chunk)
            rule(begin, std::min(chunk, range.end - begin), unwritten);
    });
}
