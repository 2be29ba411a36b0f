"""What the axes of traced values consist of, and how that becomes finer where axes meet.

An axis is a concatenation of segments, a segment a product of *atoms* from the outer digit of a position to the inner
one, and an atom a number of units whose order nothing has bound yet. Where two axes meet (``unify``), their atoms
become one, and an atom that meets a product or a concatenation consists of that from then on.

An atom may depend on others, its *parents*: for every position of theirs it is ordered anew. Splitting 12 units into 3
blocks of 4 makes the blocks and, within each of them, 4 units of its own order. Where a parent turns out to be a
concatenation, the atom has a *case* for each of its parts. Dependence is freedom: it is sound to take it away whenever
an operation mixes positions of the parent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence


class Atom:
    """Units in an order that is free unless ``reason`` says why it stays.

    Attributes:
        size: the number of units.
        parents: the atoms whose every position has an order of its own of these units.
        children: the atoms that may have this one as a parent.
        reason: why the order stays; None while it is free.
        anything: a value that is constant along these units; they meet every order.
        same: the atom that this one has become.
        term: the segments that this atom consists of, if it is no longer elementary.
        cases: a concatenation, and for each of its parts the atom that this one is there.
    """

    __slots__ = ("anything", "cases", "children", "parents", "reason", "same", "size", "term")

    def __init__(
        self, size: int, *, parents: Iterable[Atom] = (), reason: str | None = None, anything: bool = False
    ) -> None:
        self.size = size
        self.parents: set[Atom] = set() if reason or anything else set(parents)
        self.children: list[Atom] = []
        self.reason = reason
        self.anything = anything
        self.same: Atom | None = None
        self.term: Axis | None = None
        self.cases: tuple[Atom, list[Atom]] | None = None
        for parent in self.parents:
            parent.children.append(self)

    @property
    def elementary(self) -> bool:
        """Whether it consists of nothing finer."""
        return self.term is None and self.cases is None


Segment = tuple[Atom, ...]
Axis = tuple[Segment, ...]


def fresh(size: int) -> Axis:
    """An axis about which nothing is known."""
    return _single(size, Atom(size))


def fixed(size: int, reason: str) -> Axis:
    """An axis that stays as it is."""
    return _single(size, Atom(size, reason=reason))


def constant(size: int) -> Axis:
    """An axis along which a value does not change."""
    return _single(size, Atom(size, anything=True))


def _single(size: int, atom: Atom) -> Axis:
    return ((atom,),) if size > 1 else ((),) * size


def length(axis: Axis) -> int:
    """The number of positions of an axis."""
    return sum(math.prod(atom.size for atom in segment) for segment in axis)


def find(atom: Atom) -> Atom:
    """What an atom has become."""
    while atom.same is not None:
        if atom.same.same is not None:
            atom.same = atom.same.same
        atom = atom.same
    return atom


def walk(axes: Iterable[Axis]) -> Iterator[Atom]:
    """Every atom that the axes consist of, elementary or not."""
    for axis in axes:
        for segment in axis:
            for atom in segment:
                atom = find(atom)
                yield atom
                if atom.term is not None:
                    yield from walk([atom.term])
                elif atom.cases is not None:
                    yield from walk([(tuple(atom.cases[1]),)])


def leaves(axes: Iterable[Axis]) -> dict[Atom, None]:
    """The elementary atoms of the axes, each once, in order."""
    return dict.fromkeys(atom for atom in walk(axes) if atom.elementary)


def freeze(axes: Iterable[Axis], reason: str) -> None:
    """Let the axes stay as they are."""
    for atom in leaves(axes):
        if not atom.anything and atom.reason is None:
            atom.reason = reason
            atom.parents.clear()


def restrict(axes: Sequence[Axis]) -> None:
    """Take away every dependence on atoms that are not on these axes, which are all that a value has."""
    present = dict.fromkeys(walk(axes))
    for atom in present:
        if atom.elementary:
            atom.parents &= present.keys()
        elif atom.cases is not None and find(atom.cases[0]) not in present:
            collapse(atom)


def collapse(atom: Atom) -> None:
    """Make all cases of an atom one."""
    assert atom.cases is not None
    members = atom.cases[1]
    atom.cases = None
    atom.same = members[0]
    for member in members[1:]:
        _unify_atoms(members[0], member)


def segments(axis: Axis) -> list[list[Atom]]:
    """The axis as a concatenation of products, as fine as its atoms have become.

    What is still not elementary in it is a concatenation behind another digit, which no concatenation of products is
    equal to.
    """
    return [finer for segment in axis for finer in _expanded(list(segment))]


def _expanded(digits: list[Atom]) -> list[list[Atom]]:
    position = 0
    while position < len(digits):
        atom = digits[position] = find(digits[position])
        if atom.term is not None and len(atom.term) == 1:
            digits[position : position + 1] = atom.term[0]
            continue
        if atom.term is not None and all(digit.size == 1 for digit in digits[:position]):
            before, after = digits[:position], digits[position + 1 :]
            return [
                finer
                for part, inner in enumerate(atom.term)
                for finer in _expanded([*before, *inner, *(chosen(digit, atom, part) for digit in after)])
            ]
        position += 1
    return [digits]


def chosen(atom: Atom, concatenation: Atom, part: int) -> Atom:
    """The atom where ``concatenation`` is in one of its parts."""
    atom = find(atom)
    if atom.cases is not None:
        of, members = atom.cases
        if find(of) is find(concatenation):
            return find(members[part])
        inner = [chosen(member, concatenation, part) for member in members]
        if all(new is find(old) for new, old in zip(inner, members, strict=True)):
            return atom
        twin = Atom(atom.size)
        twin.cases = (of, inner)
        return twin
    if atom.term is not None:
        term = tuple(tuple(chosen(digit, concatenation, part) for digit in segment) for segment in atom.term)
        if all(new is find(old) for new, old in zip(_flat(term), _flat(atom.term), strict=True)):
            return atom
        return _compound(term)
    return atom


def _flat(axis: Axis) -> list[Atom]:
    return [atom for segment in axis for atom in segment]


def _compound(axis: Axis) -> Atom:
    """One atom that consists of an axis."""
    if len(axis) == 1 and len(axis[0]) == 1:
        return find(axis[0][0])
    atom = Atom(length(axis))
    atom.term = axis
    return atom


def unify(first: Axis, second: Axis) -> Axis:
    """Make two axes of one length one, position by position; the axis of an operation's result."""
    ones, others = segments(first), segments(second)
    while ones and others:
        one, other = _next(ones), _next(others)
        sizes = _size(one), _size(other)
        if sizes[0] == sizes[1]:
            _unify_products(ones.pop(0), others.pop(0))
            continue
        longer = ones if sizes[0] > sizes[1] else others
        cut = _cut(longer[0], min(sizes))
        if cut is None:
            _mismatch(tuple(map(tuple, [*ones, *others])))
            break
        longer[0:1] = cut
    return _informed(first, second)


def _informed(first: Axis, second: Axis) -> Axis:
    """Which of two unified axes tells more: that without constants."""
    free = [[atom.anything for atom in leaves([axis])] for axis in (first, second)]
    if not any(free[0]) or all(free[1]):
        return first
    if not any(free[1]) or all(free[0]):
        return second
    _mismatch(first)
    _mismatch(second)
    return fixed(length(first), MISMATCH)


def _next(parts: list[list[Atom]]) -> list[Atom]:
    """The first product, after what has become finer since the list was made."""
    parts[0:1] = _expanded(parts[0])
    return parts[0]


def _size(digits: Iterable[Atom]) -> int:
    return math.prod(atom.size for atom in digits)


MISMATCH = "it meets axes that are divided in another way"


def _mismatch(axis: Axis) -> None:
    freeze([axis], MISMATCH)


def _cut(digits: list[Atom], size: int) -> list[list[Atom]] | None:
    """A product as two, the first of which has ``size`` positions."""
    first = next((i for i, atom in enumerate(digits) if atom.size > 1), 0)
    before, atom, after = digits[:first], digits[first], digits[first + 1 :]
    inner = _size(after)
    if size % inner:
        return None
    if atom.cases is not None:
        collapse(atom)
        atom = find(atom)
    if atom.anything:
        parts = [constant(size // inner)[0], constant(atom.size - size // inner)[0]]
        return [[*before, *part, *after] for part in parts]
    divide(atom, [size // inner, atom.size - size // inner])
    return _expanded([*before, atom, *after])


def divide(atom: Atom, sizes: Sequence[int]) -> None:
    """Let an elementary atom be a concatenation of parts."""
    parts = tuple((Atom(size, parents=atom.parents, reason=atom.reason),) for size in sizes)
    _become(atom, parts)


def _become(atom: Atom, term: Axis) -> None:
    atom.term = term
    _pass_on(atom)


def _pass_on(atom: Atom) -> None:
    """Let the children of an atom that is no longer elementary depend on what it has become."""
    children = [child for child in atom.children if atom in child.parents and child.elementary]
    atom.children = []
    for child in children:
        child.parents.discard(atom)
    for child in children:
        _depend(child, atom)
    for parent in atom.parents:
        parent.children = [child for child in parent.children if child is not atom]
    atom.parents = set()


def _depend(child: Atom, on: Atom) -> None:
    """Let an atom have an order of its own for every position of another."""
    child, on = find(child), find(on)
    if on.size == 1 or child is on or child.reason is not None or child.anything or on.anything:
        return
    if on.term is not None and len(on.term) == 1:
        for digit in on.term[0]:
            _depend(child, digit)
        return
    if child.term is not None:
        for leaf in leaves([child.term]):
            _depend(leaf, on)
        return
    if on.elementary:
        if child.cases is not None:
            for member in child.cases[1]:
                _depend(member, on)
        else:
            child.parents.add(on)
            on.children.append(child)
        return
    if on.cases is not None:
        concatenation = find(on.cases[0])
        parts: list[Segment] = [(member,) for member in on.cases[1]]
    else:
        assert on.term is not None
        concatenation, parts = on, list(on.term)
    if child.cases is None:
        child.cases = (concatenation, [Atom(child.size, parents=child.parents) for _ in parts])
        _pass_on(child)
    elif find(child.cases[0]) is not concatenation:
        for member in child.cases[1]:
            _depend(member, on)
        return
    for member, part in zip(child.cases[1], parts, strict=True):
        for digit in part:
            _depend(member, digit)


def factor(atom: Atom, outer: int) -> tuple[Atom, Atom] | None:
    """An atom as a product of ``outer`` blocks and the units within them; None if it is not divided so."""
    atom = find(atom)
    inner = atom.size // outer
    if atom.cases is not None:
        collapse(atom)
        atom = find(atom)
    if atom.anything:
        return Atom(outer, anything=True), Atom(inner, anything=True)
    if atom.elementary:
        blocks = Atom(outer, parents=atom.parents, reason=atom.reason)
        units = Atom(inner, parents={*atom.parents, blocks}, reason=atom.reason)
        _become(atom, ((blocks, units),))
        return blocks, units
    assert atom.term is not None
    parts: list[tuple[Segment, Segment]] = []
    for digits in segments(atom.term):
        halves = regroup(digits, [_size(digits) // inner, inner]) if _size(digits) % inner == 0 else None
        if halves is None:
            return None
        parts.append((halves[0][0], halves[1][0]))
    if len(parts) == 1:
        return _compound((parts[0][0],)), _compound((parts[0][1],))
    blocks, units = Atom(outer), Atom(inner)
    blocks.term = tuple(part[0] for part in parts)
    units.cases = (blocks, [_compound((part[1],)) for part in parts])
    return blocks, units


def digits(axis: Axis) -> list[Atom]:
    """An axis as one product; concatenations are single digits of it."""
    found: list[Atom] = []
    for atom in axis[0] if len(axis) == 1 else (_compound(axis),):
        atom = find(atom)
        if atom.term is not None and len(atom.term) == 1:
            found += digits(atom.term)
        else:
            found.append(atom)
    return found


def regroup(product: Iterable[Atom], sizes: Sequence[int]) -> list[Axis] | None:
    """A product cut into axes of the given sizes, which multiply to its own; None if it is not divided so."""
    left = [digit for atom in product for digit in digits(((atom,),)) if digit.size > 1]
    axes: list[Axis] = []
    for size in sizes:
        segment: list[Atom] = []
        while (missing := size // _size(segment)) > 1:
            atom = left.pop(0)
            if missing % atom.size == 0:
                segment.append(atom)
                continue
            halves = factor(atom, missing) if atom.size % missing == 0 else None
            if halves is None:
                return None
            segment += digits(((halves[0],),))
            left[0:0] = digits(((halves[1],),))
        axes.append((tuple(segment),))
    return axes


def _unify_products(ones: list[Atom], others: list[Atom]) -> None:
    left = [[atom for atom in product if atom.size > 1] for product in (ones, others)]
    while left[0] and left[1]:
        for product in left:
            product[0:1] = digits(((product[0],),))
        one, other = left[0][0], left[1][0]
        if one.size == other.size:
            _unify_atoms(left[0].pop(0), left[1].pop(0))
            continue
        larger, smaller = (0, other) if one.size > other.size else (1, one)
        halves = factor(left[larger][0], smaller.size) if left[larger][0].size % smaller.size == 0 else None
        if halves is None:
            _mismatch((*(tuple(product) for product in left),))
            return
        left[larger][0:1] = halves


def _unify_atoms(one: Atom, other: Atom) -> None:
    one, other = find(one), find(other)
    if one is other or one.anything or other.anything:
        return
    if one.elementary and other.elementary:
        _join(one, other)
    elif one.elementary or other.elementary:
        _bind(*((one, other) if one.elementary else (other, one)))
    elif one.cases is not None and other.cases is not None and find(one.cases[0]) is find(other.cases[0]):
        pairs = list(zip(one.cases[1], other.cases[1], strict=True))
        other.cases, other.same = None, one
        for mine, its in pairs:
            _unify_atoms(mine, its)
    elif one.cases is not None or other.cases is not None:
        collapse(one if one.cases is not None else other)
        _unify_atoms(one, other)
    else:
        assert one.term is not None
        assert other.term is not None
        terms = one.term, other.term
        unify(*terms)
        if [length((part,)) for part in terms[0]] == [length((part,)) for part in terms[1]] and find(other) is other:
            other.term, other.same = None, one


def _join(one: Atom, other: Atom) -> None:
    """Make two elementary atoms one."""
    one.reason = one.reason or other.reason
    one.parents = set() if one.reason else one.parents & other.parents
    other.same = one
    for child in other.children:
        if other in child.parents:
            child.parents.discard(other)
            if child is not one:
                child.parents.add(one)
                one.children.append(child)


def _bind(atom: Atom, compound: Atom) -> None:
    """Let an elementary atom be what another one, which is not, consists of."""
    inside = dict.fromkeys(walk([((compound,),)]))
    for part in inside:
        if part.elementary:
            part.parents &= atom.parents | inside.keys()
            part.parents.discard(atom)
    for part in inside:
        if part.cases is not None and find(part.cases[0]) not in inside:
            collapse(part)
    compound = find(compound)
    if atom.reason is not None:
        freeze([((compound,),)], atom.reason)
    if compound.elementary:
        _unify_atoms(atom, compound)
        return
    atom.same = compound
    children = [child for child in atom.children if atom in child.parents and child.elementary]
    atom.children, atom.parents = [], set()
    for child in children:
        child.parents.discard(atom)
    for child in children:
        _depend(child, compound)


def part_of(axis: Axis, start: int, stop: int) -> tuple[Axis, list[tuple[Atom, int]]] | None:
    """The positions from ``start`` to ``stop`` of an axis.

    Returns:
        The axis that they are, and which part of which concatenation they lie in, as other axes may depend on that;
        None if they cut through products.
    """
    if start == 0 and stop == length(axis):
        return axis, []
    found: list[Segment] = []
    choices: list[tuple[Atom, int]] = []
    begin = 0
    for segment in axis:
        end = begin + _size(segment)
        low, high = max(start, begin), min(stop, end)
        if low < high:
            piece = _part_of_product(list(segment), low - begin, high - begin)
            if piece is None:
                return None
            found += piece[0]
            choices = piece[1] if (low, high) == (start, stop) else []
        begin = end
    return tuple(found), choices


def _part_of_product(product: list[Atom], start: int, stop: int) -> tuple[Axis, list[tuple[Atom, int]]] | None:
    if stop - start == _size(product):
        return (tuple(product),), []
    product = digits((tuple(product),))
    first = next(i for i, atom in enumerate(product) if atom.size > 1)
    before, atom, after = product[:first], product[first], product[first + 1 :]
    inner = _size(after)
    low, high = start // inner, -(-stop // inner)
    if high - low > 1 and (start % inner or stop % inner):
        return None
    if high - low < atom.size:
        if atom.cases is not None:
            collapse(atom)
            return _part_of_product([*before, atom, *after], start, stop)
        if atom.anything:
            outer: Axis = constant(high - low)
            choices: list[tuple[Atom, int]] = []
        else:
            if atom.elementary:
                divide(atom, [size for size in (low, high - low, atom.size - high) if size])
            assert atom.term is not None
            piece = part_of(atom.term, low, high)
            if piece is None:
                return None
            outer, choices = piece
            ends = [0]
            for part in atom.term:
                ends.append(ends[-1] + _size(part))
            within = next((i for i in range(len(atom.term)) if ends[i] <= low and high <= ends[i + 1]), None)
            if within is not None:
                choices = [(atom, within), *choices]
        for concatenation, place in choices:
            after = [chosen(digit, concatenation, place) for digit in after]
    else:
        outer, choices = ((atom,),), []
    if high - low == 1 and stop - start < inner:
        rest = _part_of_product(after, start - low * inner, stop - low * inner)
        return None if rest is None else (rest[0], choices + rest[1])
    if len(outer) > 1 and after:
        whole = _compound(outer)
        return ((*before, whole, *after),), choices
    return tuple((*before, *segment, *after) for segment in outer), choices
