"""Compiled measures of two arrays of floats: tile by tile, each in a processor's nearest cache, all in float64.

The loops over a tile are written so that the compiler makes vector instructions of them: no branches, no lookups but
for 8-bit floats, integers where floats would need an order. Rare events (a new largest relative error, errors beyond
the bound, values that are not finite) are seen from a tile's figures, and examined in a second loop.

This module loads numba; `regress.compare.metrics.striped_measures` imports it when two arrays are large enough to be
worth it.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

TILE = 1024
"""Elements of a tile; fewer than a 16-bit integer counts, and a multiple of ``LANES``."""
LANES = 64
"""Bytes that are compared at a time; each gives a bit of an integer."""
NEAR = 24
"""Octaves below the largest error of a tile whose errors are counted in vectors."""
SQUARE, GOLDEN, PRODUCT, SUM, TOP, RELATIVE, ROW_SQUARE, ROW_GOLDEN = range(8)
"""Places in ``sums``: squared errors, squared golden values, their product, signed errors, the largest error and
relative error, and the first two of these of the worst row."""
OVER, WORST, MISMATCHED, FIRST_MISMATCH, FINITE, ULPS, DIFFERENT, ROW = range(8)
"""Places in ``counts``: as in `striped_measures.Measures`, and the first element whose bytes differ."""
SHIFTED, HALF, TABLE = range(3)
"""Conversions of narrow floats to float32: bfloat16 by a shift, float16 by arithmetic, 8-bit floats by a table."""

_INFINITE = np.int64(0x7FF << 52)
_compiled = njit(nogil=True, cache=True)
_reordered = njit(nogil=True, cache=True, fastmath={"reassoc", "contract"})  # sums by lanes; NaN stays NaN


@_reordered
def _figures(x, y, exponents, steep):
    """Return sums over a tile, its largest error as bits, and more than 0 if one exceeds ``steep`` x golden."""
    square = golden = product = total = 0.0
    top, above = np.int64(0), np.int64(0)
    for i in range(len(exponents)):
        a, g = np.float64(x[i]), np.float64(y[i])
        signed = a - g
        error = abs(signed)
        total += signed
        square += signed * signed
        product += signed * g
        golden += g * g
        bits = np.float64(error).view(np.int64)
        top = max(top, bits)  # as integers, where a NaN is the largest of all
        exponents[i] = np.uint16(bits >> 52)
        above = max(above, np.float64(error - steep * abs(g)).view(np.int64))
    return square, golden, product, total, top, above


@_reordered
def _golden(y):
    """Return the sum of squares of a tile, and its largest value as bits."""
    golden, top = 0.0, np.int64(0)
    for i in range(len(y)):
        g = np.float64(y[i])
        golden += g * g
        top = max(top, np.float64(abs(g)).view(np.int64))
    return golden, top


@_compiled
def _unequal(p, q):
    different = p[0] ^ q[0]
    for i in range(len(p)):
        different |= p[i] ^ q[i]
    return different != 0


@_compiled
def _differing(p, q):
    found = np.int64(0)
    for i in range(len(p)):
        found += np.int64(p[i] != q[i])
    return found


@_compiled
def _first_differing(p, q):
    for i in range(len(p)):
        if p[i] != q[i]:
            return i
    return -1


@_compiled
def _over(x, y, bound):
    found = np.int64(0)
    for i in range(len(x)):
        found += np.int64(abs(np.float64(x[i]) - np.float64(y[i])) > bound)
    return found


@_compiled
def _first(x, y, error):
    for i in range(len(x)):
        if abs(np.float64(x[i]) - np.float64(y[i])) == error:
            return i
    return -1


@_compiled
def _steepest(x, y, most):
    for i in range(len(x)):
        g = abs(np.float64(y[i]))
        error = abs(np.float64(x[i]) - np.float64(y[i]))
        if error > 0.0:
            most = max(most, error / g if g > 0.0 else np.inf)
    return most


@_compiled
def _tally(exponents, below, top, octaves):
    """Count errors by octave: those near the largest in vectors, an octave at a time, and the few others one by one."""
    size = len(exponents)
    below[size:] = 255
    for i in range(size):
        below[i] = np.uint8(min(np.uint16(top - exponents[i]), np.uint16(255)))
    seen, errors = 0, _at_least(exponents, np.uint16(1))
    for depth in range(min(NEAR, top)):
        count = 0
        for start in range(0, size, LANES):
            count += _at_most(below, start, np.uint8(depth))
        octaves[top - depth] += count - seen
        seen = count
        if seen == errors:
            return
    for i in range(size):
        if exponents[i] <= top - NEAR:
            octaves[exponents[i]] += 1


@intrinsic
def _at_most(typing, values, start, limit):
    """Count the bytes ``values[start : start + LANES]`` that are at most ``limit`` in one vector comparison.

    A loop would compile to eight times as many instructions, as the compiler widens bytes before it adds them up.
    """

    def code(context, builder, signature, arguments):
        lanes = ir.VectorType(ir.IntType(8), LANES)
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        place = builder.bitcast(builder.gep(array.data, [arguments[1]]), lanes.as_pointer())
        first = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        unset = ir.Constant(lanes, ir.Undefined)
        limits = builder.insert_element(unset, arguments[2], ir.Constant(ir.IntType(32), 0))
        limits = builder.shuffle_vector(limits, unset, first)
        within = builder.icmp_unsigned("<=", builder.load(place, align=1), limits)
        return builder.ctpop(builder.bitcast(within, ir.IntType(LANES)))

    return types.int64(values, types.int64, types.uint8), code


@_compiled
def _at_least(exponents, least):
    found = np.uint16(0)
    for i in range(len(exponents)):
        found = np.uint16(found + np.uint16(exponents[i] >= least))
    return found


def _ulps(p, q):
    """Return the largest distance of two tiles of floats, whose bits are given as integers."""
    raise NotImplementedError  # numba compiles the overload below, one for each width, and never calls this


@overload(_ulps)
def _ulps_of(p, q):
    width = p.dtype.bitwidth
    signed, unsigned = getattr(np, f"int{width}"), getattr(np, f"uint{width}")
    sign, low = width - 1, 2 ** (width - 1) - 1

    def most(p, q):
        found = unsigned(0)
        for i in range(len(p)):
            s, t = signed(p[i] >> sign), signed(q[i] >> sign)
            a = signed(signed(signed(p[i] & signed(low)) ^ s) - s)
            b = signed(signed(signed(q[i] & signed(low)) ^ t) - t)
            found = max(found, unsigned(unsigned(max(a, b)) - unsigned(min(a, b))))
        return np.uint64(found)

    return most


@_compiled
def _clean(x, y, p, q, start, counts):
    """Return the tile with zeros for pairs that are not finite, which are counted."""
    x, y, p, q = x.copy(), y.copy(), p.copy(), q.copy()
    for i in range(len(x)):
        a, g = x[i], y[i]
        if np.isfinite(a) and np.isfinite(g):
            continue
        counts[FINITE] -= 1
        if a != g and not (np.isnan(a) and np.isnan(g)):
            counts[MISMATCHED] += 1
            if counts[FIRST_MISMATCH] < 0:
                counts[FIRST_MISMATCH] = start + i
        x[i] = y[i] = 0
        p[i] = q[i] = 0
    return x, y, p, q


@_compiled
def _tile(x, y, p, q, start, bound, bitwise, sums, counts, octaves, exponents, below):
    """Add a tile to the figures; return its squared errors and golden values."""
    counts[FINITE] += len(x)
    if not _unequal(p[:32], q[:32]) and not _unequal(p, q):
        golden, top = _golden(y)
        if top < _INFINITE:
            sums[GOLDEN] += golden
            return 0.0, golden
    elif bitwise:
        counts[OVER] += _differing(p, q)
        if counts[DIFFERENT] < 0:
            counts[DIFFERENT] = start + _first_differing(p, q)
    steep = sums[RELATIVE] * (1.0 + 1e-15)  # the same quotient again, however rounded, is not news
    square, golden, product, total, bits, above = _figures(x, y, exponents, steep)
    if bits >= _INFINITE:
        x, y, p, q = _clean(x, y, p, q, start, counts)
        square, golden, product, total, bits, above = _figures(x, y, exponents, steep)
    sums[SQUARE] += square
    sums[GOLDEN] += golden
    sums[PRODUCT] += product
    sums[SUM] += total
    if bits == 0:
        return square, golden
    top = np.int64(bits).view(np.float64)
    if top > sums[TOP]:
        sums[TOP] = top
        counts[WORST] = start + _first(x, y, top)
    if top > bound and not bitwise:
        counts[OVER] += _over(x, y, bound)
    if above > 0:
        sums[RELATIVE] = _steepest(x, y, sums[RELATIVE])
    counts[ULPS] = np.int64(max(np.uint64(counts[ULPS]), _ulps(p, q)))
    _tally(exponents, below, bits >> 52, octaves)
    return square, golden


@_compiled
def scan(x, y, p, q, row, bound, bitwise, sums, counts, octaves):
    """Measure arrays of float32 or float64 ``x`` and ``y``, whose bits are ``p`` and ``q``."""
    scratch, below = np.empty(TILE, np.uint16), np.empty(TILE, np.uint8)
    width = row if row else len(x)
    for first in range(0, len(x), width):
        square = golden = 0.0
        for start in range(first, first + width, TILE):
            stop = min(start + TILE, first + width)
            s, g = _tile(
                x[start:stop], y[start:stop], p[start:stop], q[start:stop],
                start, bound, bitwise, sums, counts, octaves, scratch[: stop - start], below,
            )  # fmt: skip
            square += s
            golden += g
        if row:
            _row(first // row, square, golden, sums, counts)


@_compiled
def scan_narrow(p, q, how, table, row, bound, bitwise, sums, counts, octaves):
    """Measure arrays of floats of 8 or 16 bits, given as integers."""
    scratch, below = np.empty(TILE, np.uint16), np.empty(TILE, np.uint8)
    x, y = np.empty(TILE, np.int32), np.empty(TILE, np.int32)
    width = row if row else len(p)
    for first in range(0, len(p), width):
        square = golden = 0.0
        for start in range(first, first + width, TILE):
            stop = min(start + TILE, first + width)
            a, b = x[: stop - start], y[: stop - start]
            _widen(p[start:stop], a, how, table)
            _widen(q[start:stop], b, how, table)
            s, g = _tile(
                a.view(np.float32), b.view(np.float32), p[start:stop], q[start:stop],
                start, bound, bitwise, sums, counts, octaves, scratch[: stop - start], below,
            )  # fmt: skip
            square += s
            golden += g
        if row:
            _row(first // row, square, golden, sums, counts)


@_compiled
def _row(index, square, golden, sums, counts):
    if square > sums[ROW_SQUARE]:
        sums[ROW_SQUARE], sums[ROW_GOLDEN], counts[ROW] = square, golden, index


@_compiled
def _widen(bits, out, how, table):
    """Return the bits of the same values in float32."""
    if how == SHIFTED:
        for i in range(len(out)):
            out[i] = np.int32(np.int32(bits[i]) << np.int32(16))
    elif how == TABLE:
        for i in range(len(out)):
            out[i] = table[np.uint8(bits[i])]
    else:
        _halves(bits, out, out.view(np.float32))


@_compiled
def _halves(bits, out, values):
    for i in range(len(out)):
        out[i] = np.int32(np.int32(bits[i] & np.int16(0x7FFF)) << np.int32(13))
    for i in range(len(out)):
        values[i] *= np.float32(
            2.0**112
        )  # the exponent of float16 begins that much higher; subnormals come right too
    for i in range(len(out)):
        sign = np.int32(np.int32(bits[i]) & np.int32(-(2**31)))
        special = (
            np.int32(0x7F800000) if np.int16(bits[i] & np.int16(0x7C00)) == np.int16(0x7C00) else np.int32(0)
        )
        out[i] = np.int32(np.int32(out[i] | special) | sign)
