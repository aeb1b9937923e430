"""A photo's file as pixels, in TensorFlow: for training, evaluation and exports.

Each value equals the one that Pillow decodes (`io.images.open_photo`), which checks photos before
they are converted, and reads them for axial-predict. TensorFlow's default method for JPEGs rounds two thirds of the
values otherwise.
"""

import functools

import tensorflow as tf

from axial.data.levels import DEEP_DIVISORS, DEPTH, NOISE, NOISE_VALUES, PERCENTILES
from axial.io.images import LARGEST_PIXELS, MOST_SCANNED

_SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"BM")  # of JPEG, PNG, GIF and BMP; WebP has two parts
_JPEG, _PNG, _GIF, _BMP, _WEBP, _OTHER = range(6)
_EXIF, _ADOBE = b"Exif\0\0", b"\xff\xee\0\x0eAdobe"
_UNITS = [0, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 4, 0, 0, 8, 0]  # bytes of a value of each type of TIFF; 0 for none
_MOST_PARTS = 2**16  # segments, chunks and blocks of a file that are walked; a PNG of 512 MB has so many of 8 kB


def decode(encoded, levels=DEPTH):
    """uint8 [h, w, 3] of a photo's file, string [], as it is stored.

    16 bits become 8 by `levels`; see `levels.eight_bits`. Records have photos of 16 bits only where a version of
    axial converted them that knew no other way than 'depth'. Transparency is dropped. Of several pictures in a JPEG,
    PNG or GIF, the first is decoded.

    TensorFlow raises InvalidArgumentError for a damaged file, and for what it cannot decode as Pillow does: other
    formats than JPEG, PNG, WebP, GIF and BMP; a CMYK JPEG without the marker of Adobe; a WebP that moves; a GIF whose
    first picture does not fill it; a BMP of 1, 4 or 16 bits a pixel, or of run lengths. So do the limits of
    `open_image` for the pixels of a PNG and the scans of a JPEG.
    """
    is_jpeg = _slice(encoded, 0, 3) == _SIGNATURES[_JPEG]
    image = tf.cond(is_jpeg, lambda: _jpeg(encoded), lambda: _of_another_format(encoded, levels))
    return tf.ensure_shape(image, [None, None, 3])


def _rare(function):
    """A branch that few photos take, as one operation: a graph walks through all operations of branches not taken."""
    in_graph = tf.function(function, autograph=False, experimental_attributes={"_noinline": True})

    @functools.wraps(function)
    def branch(*args):
        return function(*args) if tf.executing_eagerly() else in_graph(*args)

    return branch


@_rare
def _of_another_format(encoded, levels):
    decoders = {_PNG: functools.partial(_png, levels=levels), _GIF: _gif, _BMP: _bmp, _WEBP: _webp, _OTHER: _other}
    branches = {key: functools.partial(one, encoded) for key, one in decoders.items()}
    return tf.switch_case(_format(encoded), {**branches, _JPEG: branches[_OTHER]})


def turn(image, orientation):
    """uint8 [h, w, 3] of an EXIF orientation, int [] from 1 to 8, as it is looked at: mirrored and turned."""
    orientation = tf.cast(orientation, tf.int32)
    upright = tf.cond(orientation == 1, lambda: image, lambda: _turn(image, orientation))
    return tf.ensure_shape(upright, [None, None, 3])


@_rare
def _turn(image, orientation):
    def turned(mirror, quarters):
        return lambda: tf.image.rot90(image[:, ::-1] if mirror else image, quarters)

    # Of each orientation: whether the image is mirrored, and then its quarter turns against the clock.
    turns = [(False, 0), (True, 0), (False, 2), (True, 2), (True, 1), (False, 3), (True, 3), (False, 1)]
    return tf.switch_case(orientation - 1, [turned(*one) for one in turns])


def _format(encoded):
    """int32 []: the format that the first bytes are of."""
    found = [_slice(encoded, 0, len(start)) == start for start in _SIGNATURES]
    webp = (_slice(encoded, 0, 4) == b"RIFF") & (_slice(encoded, 8, 4) == b"WEBP")
    return tf.argmax(tf.cast(tf.stack([*found, webp, True]), tf.int32), output_type=tf.int32)


# === Pixels ===


def _refuse(unless, text):
    return tf.control_dependencies([tf.debugging.Assert(unless, [f"{text}; save the photo as a PNG or RGB JPEG"])])


def _jpeg(encoded):
    height, width, inks = tf.unstack(tf.cast(tf.io.extract_jpeg_shape(encoded), tf.int64))
    data = tf.io.decode_raw(encoded, tf.uint8)
    few = tf.math.count_nonzero(_found(data, b"\xff\xda")) * height * width <= MOST_SCANNED
    told = tf.cond(inks == 4, lambda: tf.reduce_any(_found(data, _ADOBE)), lambda: True)
    with _refuse(told, "a CMYK JPEG without the marker of Adobe"), _refuse(few, "a JPEG of too many scans"):
        return tf.io.decode_jpeg(encoded, channels=3, dct_method="INTEGER_ACCURATE")


def _png(encoded, levels):
    def deep():
        values = tf.cast(tf.io.decode_png(encoded, channels=3, dtype=tf.uint16), tf.int32)
        if levels == PERCENTILES:
            grey = _bytes(encoded, 25, 1)[0] & 2 == 0
            return _by_percentiles(values[..., : tf.where(grey, 1, 3)]) + tf.zeros_like(values, tf.uint8)
        beyond = tf.reduce_max(values) >= [256 * divisor for divisor in DEEP_DIVISORS[:-1]]
        return tf.cast(values // tf.gather(DEEP_DIVISORS, tf.math.count_nonzero(beyond)), tf.uint8)

    pixels = tf.reduce_prod([tf.cast(_number(encoded, place, big=True), tf.int64) for place in (16, 20)])
    with _refuse(pixels <= LARGEST_PIXELS, "a PNG of too many pixels"):
        return tf.cond(_bytes(encoded, 24, 1)[0] == 16, deep, lambda: tf.io.decode_png(encoded, channels=3))


def _by_percentiles(values):
    """uint8 of the shape of int32 [h, w, n], values of 16 bits; see `levels.eight_bits`."""
    size = tf.size(values)
    last = size - 1
    rank = tf.minimum(tf.cast(tf.sqrt(tf.cast(size, tf.float64)), tf.int32) // 4 + 1, last // 2)
    low, high, first, final = tf.unstack(_ranked(values, [rank, last - rank, 0, last]))
    low, high = tf.unstack(tf.where(low < high, [low, high], [first, final]))
    rows = values[:: tf.maximum(size // NOISE_VALUES, 1)]
    changes = tf.abs(rows[:, 1:] - rows[:, :-1])
    noise = tf.where(tf.size(changes) > 0, _ranked(changes, [tf.size(changes) // 2])[0], 0)
    extent = tf.maximum(tf.maximum(high - low, NOISE * noise), 1)
    return tf.cast((510 * (tf.clip_by_value(values, low, high) - low) + extent) // (2 * extent), tf.uint8)


def _ranked(values, ranks):
    """int32: the values of 16 bits that have these ranks, from 0 on."""
    upto = tf.cumsum(tf.math.bincount(tf.reshape(values, [-1]), minlength=2**16))
    return tf.searchsorted(upto, ranks, side="right")


def _gif(encoded):
    """The first picture. TensorFlow paints a transparent colour black, so the flag of one is taken away."""

    def step(place, skipping, flag):
        head = _bytes(encoded, place, 2)
        extension = (head[0] == 0x21) & ~skipping
        flag = tf.where(extension & (head[1] == 0xF9), place + 3, flag)
        return place + tf.where(extension, 2, 1 + head[0]), extension | (skipping & (head[0] > 0)), flag

    size, table = tf.strings.length(encoded), _bytes(encoded, 10, 1)[0]
    start = 13 + tf.where(table >= 128, tf.bitwise.left_shift(6, table & 7), 0)  # the table has 3 x 2^(n + 1) bytes
    picture, _, flag = tf.while_loop(
        lambda place, skipping, _: (place < size) & (skipping | (_bytes(encoded, place, 1)[0] != 0x2C)),
        step,
        (start, tf.constant(False), size),  # no flag is one behind the end
        maximum_iterations=_MOST_PARTS,
    )
    own, canvas = _bytes(encoded, picture + 1, 8), _bytes(encoded, 6, 4)
    opaque = tf.gather(tf.constant([bytes([i & 0xFE]) for i in range(256)]), _bytes(encoded, flag, 1)[0])
    parts = _slice(encoded, 0, flag), tf.where(flag < size, opaque, b""), _slice(encoded, flag + 1, size)
    with _refuse(tf.reduce_all(own == tf.concat([[0] * 4, canvas], 0)), "a GIF whose first picture does not fill it"):
        return tf.io.decode_image(tf.strings.join(parts), channels=3, expand_animations=False)


def _bmp(encoded):
    """Of 8 bits, TensorFlow gives places in the palette, which is before the pixels, as grey."""

    def look_up():
        first, used = _number(encoded, 14) + 14, _number(encoded, 46)
        used = tf.where(used == 0, 256, used)
        colors = tf.cast(_bytes(encoded, first, 1024), tf.uint8)
        colors = tf.reshape(colors, [256, 4])[:, 2::-1] * tf.cast(tf.range(256) < used, tf.uint8)[:, None]
        return tf.gather(colors, tf.cast(image[..., 0], tf.int32))

    bits, kind = _bytes(encoded, 28, 1)[0], _number(encoded, 30)
    usual = tf.reduce_all([_number(encoded, 54 + 4 * i) == 255 << 8 * (2 - i) for i in range(3)])  # masks of colours
    plain = (kind == 0) & ((bits == 8) | (bits == 24) | (bits == 32)) | (kind == 3) & (bits == 32) & usual
    with _refuse(plain & (_number(encoded, 14) >= 40), "a BMP of other colours than 8, 24 or 32 plain bits a pixel"):
        image = tf.io.decode_image(encoded, channels=3, expand_animations=False)
        return tf.cond(bits == 8, look_up, lambda: image)


def _webp(encoded):
    if not hasattr(tf.io, "decode_webp"):  # before TensorFlow 2.20
        return _other(encoded)
    moving = (_slice(encoded, 12, 4) == b"VP8X") & (_bytes(encoded, 20, 1)[0] & 2 > 0)
    with _refuse(~moving, "a moving WebP"):  # with which TensorFlow 2.20 crashes
        return tf.io.decode_webp(encoded)[0, :, :, :3]


def _other(encoded):
    with _refuse(False, "not a JPEG, PNG, WebP, GIF or BMP"):
        return tf.zeros([1, 1, 3], tf.uint8)


# === Orientation ===


def orientation(encoded):
    """int32 []: the orientation, 1 to 8, that EXIF gives a photo's file, string []; 1 without one.

    The block is in segments of a JPEG before its first scan, in the chunk 'eXIf' of a PNG, or in one of a WebP. The tag
    is 0x0112 (EXIF 2.32, Sec. 4.6.4). Its value is that of `io.images.orientation`.
    """
    blocks = {_JPEG: _jpeg_block, _PNG: _png_block, _WEBP: _webp_block}
    searches = {key: functools.partial(blocks.get(key, _no_block), encoded) for key in range(_OTHER + 1)}
    found = _exif_orientation(tf.switch_case(_format(encoded), searches))
    return tf.where((found >= 1) & (found <= 8), found, 1)


def _no_block(_):
    return tf.constant(b"")


def _walk(encoded, step, place):
    """The block that `step` of (place, block) finds in the parts of a file, from a place on."""
    size, start = tf.strings.length(encoded), (place, tf.constant(b""))
    place, block = tf.while_loop(lambda place, _: place < size, step, start, maximum_iterations=_MOST_PARTS)
    with _refuse(place >= size, f"a file of more than {_MOST_PARTS} parts"):
        return tf.identity(block)


def _jpeg_block(encoded):
    """The EXIF block of a JPEG. One in several segments is joined."""

    def step(place, exif):
        head = _bytes(encoded, place, 4)
        code, length = head[1], 256 * head[2] + head[3]
        segment = _slice(encoded, place + 4, tf.where(code == 0xE1, length - 2, 0))
        exif = tf.where(_slice(segment, 0, 6) == _EXIF, exif + _slice(segment, 6, length), exif)
        alone = (code <= 1) | ((code >= 0xD0) & (code <= 0xD8))  # a marker without a segment
        filling = (head[0] != 0xFF) | (code == 0xFF)
        place += tf.where(filling, 1, tf.where(alone, 2, 2 + tf.maximum(length, 1)))
        scan = ~filling & ((code == 0xDA) | (code == 0xD9))
        return tf.where(scan, size, place), exif

    size = tf.strings.length(encoded)
    return _walk(encoded, step, 2)


def _png_block(encoded):
    def step(place, exif):
        length = tf.minimum(_number(encoded, place, big=True), size)
        named = _slice(encoded, place + 4, 4) == b"eXIf"
        return tf.minimum(place + 12 + length, size), tf.where(named, _slice(encoded, place + 8, length), exif)

    size = tf.strings.length(encoded)
    return _walk(encoded, step, 8)


def _webp_block(encoded):
    def step(place, exif):
        length = tf.minimum(_number(encoded, place + 4), size)
        first = (_slice(encoded, place, 4) == b"EXIF") & (exif == b"")
        exif = tf.where(first, _slice(encoded, place + 8, length), exif)
        return tf.minimum(place + 8 + length + length % 2, size), exif

    size = tf.strings.length(encoded)
    return _walk(encoded, step, 12)


def _exif_orientation(block):
    """int32 []: the value of the tag in an EXIF block, string []; 0 without it, 9 for a block that is none."""
    for _ in range(2):  # the name, which some write twice
        block = tf.where(_slice(block, 0, 6) == _EXIF, _slice(block, 6, tf.strings.length(block)), block)
    order, size = _slice(block, 0, 4), tf.strings.length(block)
    little = _slice(order, 0, 2) == b"II"
    known = tf.reduce_any(tf.stack([b"II*\0", b"II\0*", b"MM\0*", b"MM*\0"]) == order)

    def number(places, count):
        """int32: numbers of some bytes each, at places of the block."""
        data = tf.cast(tf.pad(tf.io.decode_raw(block, tf.uint8), [[0, 16]]), tf.int64)
        data = tf.gather(data, tf.clip_by_value(places, 0, size)[..., None] + tf.range(count))
        data = tf.where(little, data[..., ::-1], data)
        powers = tf.constant([256**i for i in reversed(range(count))], tf.int64)
        return tf.cast(tf.clip_by_value(tf.reduce_sum(data * powers, -1), 0, 2**30), tf.int32)

    first = number(tf.constant(4), 4)
    entries = first + 2 + 12 * tf.range(number(first, 2))
    entries = tf.boolean_mask(entries, entries + 12 <= size)
    kinds, place = number(entries + 2, 2), number(entries + 8, 4)
    unit = tf.gather(tf.constant(_UNITS), tf.minimum(kinds, len(_UNITS) - 1))
    length = unit * tf.minimum(number(entries + 4, 4), 2**26)
    there = (length > 0) & ((length <= 4) | (place <= size - length)) & (number(entries, 2) == 0x0112)
    place = tf.where(length > 4, place, entries + 8)
    values = tf.reduce_sum([tf.where(unit == count, number(place, count), 0) for count in (1, 2, 4, 8)], 0)
    whole = tf.reduce_any([kinds == kind for kind in (3, 4, 6, 8, 9, 13, 16)], 0)
    values = tf.boolean_mask(tf.where(whole & (values > 0), values, 9), there)
    value = tf.concat([values, [0]], 0)[0]
    return tf.where(known | (size == 0), value, 9)


# === Bytes ===


def _slice(text, place, length):
    """`length` bytes of a string [] from `place` on, or those that there are."""
    return tf.strings.substr(text, tf.clip_by_value(place, 0, tf.strings.length(text)), tf.maximum(length, 0))


def _bytes(text, place, count):
    """int32 [count]: bytes of a string [] from `place` on. They are 0 behind its end."""
    return tf.cast(tf.io.decode_raw(_slice(text, place, count), tf.uint8, fixed_length=count), tf.int32)


def _number(text, place, big=False):
    """int32 []: four bytes from `place` on as a number, at most 2^30."""
    data = tf.cast(_bytes(text, place, 4), tf.int64)
    powers = tf.constant([256 ** (3 - i if big else i) for i in range(4)], tf.int64)
    return tf.cast(tf.minimum(tf.reduce_sum(data * powers), 2**30), tf.int32)


def _found(data, pattern):
    """bool, of the shape of uint8 [n]: where a pattern begins."""
    padded = tf.pad(data, [[0, len(pattern)]])
    return tf.reduce_all([padded[i : i + tf.size(data)] == byte for i, byte in enumerate(pattern)], 0)
