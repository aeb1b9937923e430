"""The page of axial-analyze view: its numbers, its refusals, and what it does in a browser."""

import base64
import json
import re
import types
import zlib

import numpy as np
import pytest
import tensorflow as tf

from axial.analysis import view
from axial.analysis.attention_pictures import query_weights
from axial.data.preprocess import ScaledCanvas
from axial.errors import InputError
from axial.layers.attention.layer import TERMS, AxialAttention, LocalAttention
from axial.layers.spatial_attention.deformable_conv import deformable_conv
from axial.layers.spatial_attention.generalized_attention import GeneralizedAttention
from axial.metrics.panoptic_quality import Segments
from axial.models.registry import build_model
from tests import oracles, study_oracles
from tests.conftest import built, make_task
from tests.layers.test_axial_attention import folded_copy, oracle_weights
from tests.tasks import contract

HOSTILE = '<img src=x onerror="document.title = 1">&amp;</script>.png'
QUERIES = 5  # random queries of each test
MASS = 0.01  # largest part of the weight that may be elsewhere


def mass(actual, expected):
    """The part of the weight that two distributions put on different keys."""
    return np.abs(np.ravel(actual) - np.ravel(expected)).sum() / 2


# === The numbers of the page ===


def unpacked(text):
    """The int16 numbers of a `pack`."""
    planes = np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8).reshape(2, -1)
    return np.ascontiguousarray(planes.T).view(">i2").ravel()


def page_weights(layer, values, query, terms):
    """float64 [H, keys]: the weights of a query by the factors of a page, as `softmax` of view.js computes them."""
    (y, x), (Y, X), stride = query, layer["keys"], layer["stride"]
    rows = [y] if layer["axis"] == "width" else range(Y)
    columns = [x] if layer["axis"] == "height" else range(X)
    logits = np.zeros([layer["heads"], len(rows), len(columns)])
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            down, right = (y - stride * row) * (len(rows) > 1), (x - stride * column) * (len(columns) > 1)
            at = {"rows": down + stride * (Y - 1), "columns": right + stride * (X - 1)}
            q, k = (
                values[name][:, a, b] if name in values else 0 for name, a, b in (("query", y, x), ("key", row, column))
            )
            logits[:, i, j] += values["scale"] * (q * k).sum(1) if "content" in terms else 0
            logits[:, i, j] += values["saliency"][:, row, column] if "saliency" in terms else 0
            for side, index in at.items():
                for term, one in (("query", q), ("key", k)):
                    if term in terms and f"{term}_{side}" in values:
                        logits[:, i, j] += (one * values[f"{term}_{side}"][:, index]).sum(1)
                logits[:, i, j] += values[side][:, index] if "position" in terms else 0
            if max(abs(down), abs(right)) > layer["reach"]:
                logits[:, i, j] = -np.inf
    weights = np.exp(logits.reshape(len(logits), -1) - logits.max((1, 2))[:, None])
    return weights / weights.sum(1, keepdims=True)


def read_layer(layer, x):
    """(JSON dict, values of the factors after their way through the page) of a layer."""
    block = types.SimpleNamespace(submodules=[])
    (one,) = view.read_blocks(block, {"block": [layer]}, {id(layer): x})
    (about,), numbers, values = one["layers"], unpacked(one["data"]), {}
    for name, array in about["arrays"].items():
        size = int(np.prod(array["shape"]))
        values[name], numbers = numbers[:size].reshape(array["shape"]) * array["unit"], numbers[size:]
    assert not len(numbers)
    return about, values


LAYERS = {
    "height": (AxialAttention, dict(axis="height")),
    "width": (AxialAttention, dict(axis="width", max_distance=3)),
    "span": (AxialAttention, dict(axis="width", span=3)),
    "one term": (AxialAttention, dict(axis="height", terms=("key",), value_position=False)),
    "square": (LocalAttention, dict(span=3, position_sensitive=True)),
    "every term": (GeneralizedAttention, dict(setting="1111")),
    "two terms": (GeneralizedAttention, dict(setting="0110")),
    "keys and positions": (GeneralizedAttention, dict(setting="0011", window=5)),
    "stride": (GeneralizedAttention, dict(setting="1101", key_stride=2)),
}
EVERY = ("content", "query", "key", "saliency", "position")


def terms_of(values):
    """The logit terms whose factors a layer has."""
    needed = dict(content="scale", saliency="saliency", position="rows")
    has = {term: any(name.startswith(f"{term}_") for name in values) for term in ("query", "key")}
    return {term for term in EVERY if has.get(term) or needed.get(term) in values}


@pytest.mark.parametrize("name", LAYERS)
def test_the_factors_give_the_weights_of_every_query(name):
    layer_class, options = LAYERS[name]
    x = 2 * tf.random.stateless_normal([1, 6, 8, 16], [0, 1])
    if layer_class is GeneralizedAttention:
        layer = built(layer_class(heads=2, **options), x)
    else:
        layer = folded_copy(built(layer_class(16, 16, heads=2, **options), x), x)
    about, values = read_layer(layer, x)
    for query in np.random.default_rng(0).integers([6, 8], size=[QUERIES, 2]).tolist():
        actual, expected = page_weights(about, values, query, terms_of(values)), query_weights(layer, x, tuple(query))
        own = {"height": np.s_[:, :, query[1]], "width": np.s_[:, query[0]]}.get(about["axis"], np.s_[:])
        for one, other in zip(actual, expected.numpy()[own]):
            assert mass(one, other) < MASS / 10


@pytest.mark.parametrize("term", range(len(TERMS)))
def test_a_term_alone_is_that_of_the_equation(term):
    """The weights of one term, times the folded values, are the output of the oracle that has only this term."""
    x = tf.random.stateless_normal([1, 7, 1, 8], [0, 1])
    layer = built(AxialAttention(8, 8, axis="height", heads=2, value_position=False), x)
    twin = folded_copy(layer, x)
    about, values = read_layer(twin, x)
    w = oracle_weights(layer)
    w |= {name: value[term : term + 1] for name, value in w.items() if name.startswith("logit_")}
    options = dict(terms=TERMS[term : term + 1], epsilon=layer.norm.epsilon, training=False)
    expected, _ = oracles.axial_attention(x.numpy()[:, :, 0], w, 2, None, **options)
    v = (x[0, :, 0] @ twin.kernels[2] + twin.biases[2]).numpy().reshape(7, 2, 4)
    weights = [page_weights(about, values, (y, 0), {TERMS[term]}) for y in range(7)]
    actual = np.einsum("lhm,mhe->lhe", weights, v).reshape(7, 8)
    np.testing.assert_allclose(actual, expected[0], atol=2e-3 * np.abs(expected).max())


@pytest.mark.parametrize("term", range(4))
def test_a_term_of_the_study_alone_is_that_of_the_equation(term):
    x = tf.random.stateless_normal([1, 4, 3, 8], [0, 1])
    layer = built(GeneralizedAttention("1111", 2), x)
    about, values = read_layer(layer, x)
    w = {weight.name.rpartition("/")[2].removesuffix(":0"): weight.numpy() for weight in layer.weights}
    bits = f"{8 >> term:04b}"
    alone = types.SimpleNamespace(setting=bits, **{k: getattr(layer, k) for k in ("axes", "heads", "wavelength")})
    alone.__dict__.update(scaled=False, reach=layer.reach, key_stride=1)
    expected = study_oracles.generalized_attention(x.numpy().astype(np.float64), layer=alone, **w)
    name = ("content", "query", "saliency", "position")[term]
    v = (x.numpy()[0].reshape(12, 8) @ w["value_kernel"]).reshape(12, 2, 4)
    for y, x_ in ((0, 0), (3, 1), (2, 2)):
        weights = page_weights(about, values, (y, x_), {name})
        actual = np.einsum("hm,mhe->he", weights, v).ravel() @ w["output_kernel"] + w["output_bias"]
        np.testing.assert_allclose(actual, expected[0, y, x_], atol=2e-3 * np.abs(expected).max())


# === Errors of a prediction ===


def test_fates_are_those_of_the_panoptic_quality():
    """Of the true segments, the first is matched, the second has another class, the third is missed."""
    ids = np.repeat([1, 2, 3, 0, 4], 4)[None]  # the fourth is a crowd
    truth = Segments(ids, np.array([0, 1, 1, 1]), crowd=np.array([False, False, False, True]))
    guess = Segments(np.repeat([1, 2, 0, 3, 4], 4)[None], np.array([0, 0, 1, 1]))
    guess.ids[0, 11] = 5  # a quarter of the third
    guess = guess._replace(classes=np.array([0, 0, 1, 1, 1]))
    true, predicted = view.matches(truth, guess)
    assert [one["fate"] for one in true] == ["matched", "wrong class", "missed", "excused"]
    assert [one["fate"] for one in predicted] == ["matched", "wrong class", "excused", "excused", "false"]
    assert (true[2]["other"], true[2]["iou"]) == (5, 0.25) and true[0]["iou"] == 1


# === The page ===


# Small networks: axial attention, whose second block has a stride, and an attention type of the study.
NETWORKS = {"axial_deeplab_nano": (1, 1, 0, 0), "attended_deeplab_nano_1111": (1, 0, 0, 1)}


@pytest.fixture(scope="module")
def made(sample_dir):
    """list of (name, task, folded model) of the networks."""
    models = []
    for name, repeats in NETWORKS.items():
        model = {"name": name, "arguments": {"repeats": repeats}}
        task = make_task(sample_dir, (49, 65), model=model, data=dict(shuffle=0))
        models.append((name, task, task.build_model(folded=True)))
    return models


@pytest.fixture(scope="module")
def viewed(made):
    """(results of `view_model` of the networks, and of each the inputs of its layers for the first photo)."""
    inputs, read = [], view.inputs_of

    def record(*arguments):
        inputs.append(read(*arguments))
        return inputs[-1]

    examples = dict(zip(("a.jpg", HOSTILE), view.split_examples(made[0][1], "val2017", [], 2).values()))
    with contract.eagerly(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(view, "inputs_of", record)
        views = [view.view_model(name, task, model, examples) for name, task, model in made]
    return views, [photos[0] for photos in inputs]


@pytest.fixture(scope="module")
def views(viewed):
    return viewed[0]


@pytest.fixture(scope="module")
def path(views, tmp_path_factory):
    """Path of the page of both models."""
    path = tmp_path_factory.mktemp("view") / "view.html"
    assert view.write_view(str(path), views) == []
    return path


def test_the_page_is_one_file_without_markup_of_names(path):
    text = path.read_text()
    assert HOSTILE not in text and "http:" not in text.replace("http://www.w3.org", "") and "https:" not in text
    script = re.search(r"</main>\n<script>(.*)</script>", text, re.S)[1]
    assert len(script.splitlines()) < 500


def test_blocks_that_do_not_fit_or_do_not_exist(views, made, tmp_path, monkeypatch):
    html = str(tmp_path / "view.html")
    absent = pytest.raises(InputError, match="--block=stage3_block2: no such block attends.*stage3_block1")
    with absent:
        view.write_view(html, views[:1], ["stage3_block2"])
    with absent:
        view.choose_blocks(view.attending_blocks(made[0][2]), ["stage3_block2"])
    small = json.loads(json.dumps(views[:1]))
    monkeypatch.setattr(view, "FAIR", 1)
    assert view.write_view(html, small) == ["stage2_block1"]
    monkeypatch.setattr(view, "MOST", 1)
    with pytest.raises(InputError, match=r"axial_deeplab_nano need stage3_block1 \d.\d MB; expected at most"):
        view.write_view(html, small)
    plain = build_model("panoptic_deeplab_resnet_nano", 5, norm=None)
    plain(tf.zeros([1, 33, 33, 3]))
    with pytest.raises(InputError, match="RUN has no layer that attends"):
        view.attending_blocks(plain, "RUN")
    with pytest.raises(InputError, match=r"elsewhere.jpg: no such photo in .*, split val2017"):
        view.split_examples(made[0][1], "val2017", ["a/elsewhere.jpg"])


def test_of_a_large_photo_the_middle_tile_is_shown(sample_dir):
    task = make_task(sample_dir, (65, 65), data=dict(shuffle=0, photo_scale=1.0))
    assert isinstance(task.canvases, ScaledCanvas)
    photo = np.random.default_rng(0).integers(0, 255, [150, 65, 3], np.uint8)
    example = {**task.evaluator.example(photo), **task.example(tf.constant(photo))}
    prediction = {name: np.ones([150, 65], np.int32) for name in ("panoptic", "semantic", "instance")}
    prediction |= {"panoptic": np.full([150, 65], task.spec.label_divisor), "score": np.ones(1), "dropped": 0}
    seen, canvas = view.view_photo(task, lambda examples: [(examples[0], prediction)], example)
    assert canvas.shape[:2] == (65, 65) and seen["valid"] == [65, 65]
    assert "65 x 65 pixels, its middle tile" in seen["note"]
    assert seen["objects"][0]["area"] == 150 * 65 and seen["objects"][0]["id"] == 1


REFUSED = {
    "nine photos": ([f"{i}.png" for i in range(9)], "9 photos; the page shows at most 8"),
    "no photo": ([], "name at least one photo"),
    "three models": (["--model=a", "--model=b", "p.png"], "3 models; expected one or two"),
    "a split alone": (["--split=val", "p.png"], "--split needs --data_dir"),
    "no such photo": (["/nowhere.png"], "/nowhere.png: no such"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_flags(refuse, tmp_path, name):
    given, message = REFUSED[name]
    refuse(message, "analyze", "view", "--model=nuclei", f"--html={tmp_path}/view.html", *given)


def test_a_page_of_a_run_and_its_refusals(succeed, refuse, trained, exported, tmp_path, sample_dir):
    html = f"--html={tmp_path}/view.html"
    data = f"--data_dir={sample_dir}", "--split=val2017", "000000000285.jpg"
    result = succeed("analyze", "view", f"--model={trained}", html, *data)
    assert result.out == f"{tmp_path}/view.html\n"
    assert "000000000285.jpg" in (tmp_path / "view.html").read_text()
    for given, message in {
        (f"--model={exported}", html): f"--model={exported}: an export, whose attention cannot be read; give the run",
        (f"--model={trained}", f"--html={tmp_path}"): f"--html={tmp_path}: a folder; expected a file",
    }.items():
        refuse(message, "analyze", "view", *given, *data)


# === In a browser ===


def opened(chromium, path, fragment=""):
    """The browser with the page. The page is ready and has been loaded again."""
    chromium.get("about:blank")
    chromium.get(f"file://{path}#{fragment}")
    settle(chromium)
    return chromium


def settle(browser):
    """Waits until the page has shown its state."""
    browser.execute_async_script("update().then(arguments[0])")


def choose(browser, **values):
    """Sets values of the page's form, as clicks do."""
    browser.execute_script(
        """for (const [name, value] of Object.entries(arguments[0])) {
          const inputs = [...document.querySelectorAll(`[name=${name}]`)];
          for (const input of inputs) {
            if (["radio", "checkbox"].includes(input.type)) input.checked = [value].flat().includes(input.value);
            else input.value = value;
          }
        }""",
        values,
    )
    settle(browser)


def shown(browser, panel=0):
    """dict of what a panel shows: the query, its map [Y, X], and the heads' rows and columns."""
    script = """const {query, shown, block} = panels[arguments[0]];
    return {query, block: block.name, map: [...shown.map], shape: [shown.Y, shown.X],
            rows: shown.rows.map(x => [...x]), columns: shown.columns.map(x => [...x])};"""
    result = browser.execute_script(script, panel)
    return {**result, "map": np.reshape(result["map"], result["shape"])}


def expected_weights(block, inputs, query):
    """(map, row weights [H, X], column weights [H, Y]) of a query of a block's layers, by their `query_weights`."""
    y, x = query
    if len(block) == 1:
        maps = query_weights(block[0], inputs[id(block[0])], (y, x)).numpy()
        return maps.mean(0), maps.sum(1), maps.sum(2)
    first, second = (inputs[id(layer)] for layer in block)
    row = query_weights(block[1], second, (y, x)).numpy()[:, y]
    columns = query_weights(block[0], first, (y * -(-first.shape[1] // second.shape[1]), x)).numpy()
    return columns.mean(0) * row.mean(0), row, columns[:, :, x]


@pytest.mark.parametrize("panel, block", [(0, "stage2_block1"), (0, "stage3_block1"), (1, "stage5_block1")])
def test_the_page_shows_the_weights_of_random_queries(chromium, path, made, viewed, panel, block):
    browser = opened(chromium, path, f"block{panel}={block}")
    layers, inputs = view.attending_blocks(made[panel][2])[block], viewed[1][panel]
    for query in np.random.default_rng(panel).random([QUERIES, 2]):
        choose(browser, query=",".join(map(str, query)))
        seen = shown(browser, panel)
        assert seen["block"] == block
        map_, rows, columns = expected_weights(layers, inputs, seen["query"])
        assert seen["map"].shape == map_.shape and mass(seen["map"], map_) < MASS
        for actual, expected in zip(seen["rows"] + seen["columns"], [*rows, *columns], strict=True):
            assert mass(actual, expected) < MASS


def test_the_page_shows_the_samples_of_a_deformable_convolution(chromium, sample_dir, tmp_path, monkeypatch):
    """The weights are those by which a kernel of ones reads each pixel of the map."""
    name, inputs, read = "attended_deeplab_nano_deformable", [], view.inputs_of
    model = {"name": name, "arguments": {"repeats": (1, 0, 0, 1), "modulation": "sigmoid"}}
    task = make_task(sample_dir, (49, 65), model=model, data=dict(shuffle=0))
    network = task.build_model(folded=True)
    (block, (layer,)), *_ = view.attending_blocks(network).items()
    layer.offset_kernel.assign(tf.random.stateless_normal(layer.offset_kernel.shape, [0, 1], stddev=0.05))
    monkeypatch.setattr(view, "inputs_of", lambda *given: inputs.extend(read(*given)) or inputs)
    examples = view.split_examples(task, "val2017", [], 1)
    with contract.eagerly():
        view.write_view(str(tmp_path / "a.html"), [view.view_model(name, task, network, examples)])
    x = inputs[0][id(layer)]
    pixels = tf.reshape(tf.eye(x.shape[1] * x.shape[2]), [1, *x.shape[1:3], -1])
    offsets, masks = layer.offsets(x)
    options = dict(strides=layer.strides, dilation=layer.dilation, padding=layer.padding)
    weights = deformable_conv(pixels, tf.ones([3, 3, 1, pixels.shape[3]]), offsets, masks, **options)[0].numpy()
    browser = opened(chromium, tmp_path / "a.html")
    for query in np.random.default_rng(0).random([QUERIES, 2]):
        choose(browser, query=",".join(map(str, query)))
        seen = shown(browser)
        expected = weights[tuple(seen["query"])]
        assert seen["block"] == block and mass(seen["map"], expected / expected.sum()) < MASS


def test_clicks_keys_and_controls_change_what_they_should(chromium, path):
    from selenium.webdriver import ActionChains, Keys

    browser = opened(chromium, path, "block0=stage2_block1")
    first, other = shown(browser), shown(browser, 1)
    canvas = browser.find_element("css selector", "canvas")
    ActionChains(browser).move_to_element_with_offset(canvas, -60, -50).click().perform()
    settle(browser)
    clicked = shown(browser)
    assert clicked["query"] != first["query"] and mass(clicked["map"], first["map"]) > 0
    assert mass(shown(browser, 1)["map"], other["map"]) > 0  # both models show the same query
    canvas.send_keys(Keys.ARROW_DOWN)
    settle(browser)
    assert shown(browser)["query"] == [clicked["query"][0] + 1, clicked["query"][1]]
    canvas.send_keys(*[Keys.ARROW_DOWN] * 40, *[Keys.ARROW_RIGHT] * 40)
    settle(browser)
    photo = browser.execute_script("const {canvas, valid} = panels[0].photo; return {canvas, valid}")
    for query, cells, side, valid in zip(shown(browser)["query"], clicked["shape"], photo["canvas"], photo["valid"]):
        assert valid - 1.5 * side / cells < (query + 0.5) * side / cells <= valid  # not in the padding

    before = shown(browser)
    choose(browser, row0="1", column0="2")
    after = shown(browser)
    expected = np.outer(after["columns"][2], after["rows"][1])
    x = after["query"][1]
    np.testing.assert_allclose(after["map"][:, x], expected[:, x], rtol=1e-6)
    assert mass(before["map"], after["map"]) > 0 and before["rows"] == after["rows"]
    choose(browser, terms0=["query"])
    assert mass(shown(browser)["rows"][1], after["rows"][1]) > 0
    choose(browser, terms0=[])
    np.testing.assert_allclose(shown(browser)["rows"], np.full_like(after["rows"], 1 / after["shape"][1]))
    choose(browser, block0="stage3_block1")
    assert shown(browser)["block"] == "stage3_block1" and shown(browser, 1)["block"] == "stage5_block1"

    pixels = "return document.querySelector('canvas').toDataURL()"
    pictures = []
    for layer in ("photo", "prediction", "truth", "errors"):
        choose(browser, layer=layer, strength=0)
        pictures.append(browser.execute_script(pixels))
    assert len(set(pictures)) >= 3 and "missed: " in browser.find_element("css selector", ".key").text
    fragment = browser.current_url.partition("#")[2].replace("layer=errors", "layer=truth")
    opened(browser, path, fragment)  # the address has the whole state
    assert browser.execute_script(pixels) == pictures[2] and shown(browser)["block"] == "stage3_block1"


def test_figures_of_the_table_are_parts_of_the_weight(chromium, path):
    browser = opened(chromium, path, "block0=stage3_block1")
    seen, names = shown(browser), ["map shown", "even weights"]
    cells = "return [...document.querySelector('.figures').rows].map(row => [...row.cells].map(cell => cell.innerText))"
    table = browser.execute_script(cells)
    rows = {row[0]: row[1:] for row in table[1:]}
    assert set(names) < set(rows) and {"column head 4", "row head 1"} < set(rows)
    photo = browser.execute_script("const {canvas, valid} = panels[0].photo; return {canvas, valid}")
    inside = [np.arange(side) < valid for side, valid in zip(photo["canvas"], photo["valid"])]
    pixels = ~np.outer(*inside)
    cells = [(2 * np.arange(side) + 1) * cells // (2 * side) for side, cells in zip(photo["canvas"], seen["shape"])]
    weights = seen["map"] / (np.outer(*(np.bincount(c) for c in cells)))
    padding = weights[np.ix_(*cells)][pixels].sum()
    assert abs(float(rows["map shown"][0].split()[0]) / 100 - padding) < 0.001
    assert "on the query's segment: " in browser.find_element("id", "status").text


def test_no_request_leaves_the_file_and_names_are_text(chromium, path):
    chromium.get_log("performance")
    browser = opened(chromium, path, "photo=1&layer=errors&strength=nonsense&query=a&block0=%3Cb%3E&row0=99")
    blocked = "fetch('https://example.com').then(() => arguments[0]('sent'), () => arguments[0]('blocked'))"
    assert browser.execute_async_script(blocked) == "blocked"
    assert (
        HOSTILE in browser.find_element("id", "photos").text
        and HOSTILE in browser.find_element("css selector", ".note").text
    )
    assert browser.title.startswith("Attention of ")
    errors = [entry["message"] for entry in browser.get_log("browser") if "example.com" not in entry["message"]]
    assert not errors
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = {m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"}
    assert {url.partition(":")[0] for url in urls} <= {"file", "data", "about"} and len(urls) >= 1


def test_figures_have_the_layout_of_the_paper(chromium, path):
    browser = opened(chromium, path)
    save = """const done = arguments[1];
    HTMLAnchorElement.prototype.click = function () { done([this.download, this.href]); };
    document.getElementById(arguments[0]).click();"""
    name, href = browser.execute_async_script(save, "svg")
    assert name == "attention.svg" and href.startswith("data:image/svg+xml,")
    # A row of the photo and four columns' heads, one of the map and four rows' heads; the study's photo, map and heads.
    assert href.count("%3Cimage") == 2 * (1 + 4) + 2 + 4 and href.count("row%20head") == 4
    name, href = browser.execute_async_script(save, "png")
    assert name == "attention.png" and len(base64.b64decode(href.removeprefix("data:image/png;base64,"))) > 10_000


@pytest.mark.parametrize("width, scheme", [(360, "light"), (1280, "dark")])
def test_widths_and_colour_schemes(chromium, path, width, scheme):
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    try:
        browser = opened(chromium, path)
        style = """const {scrollWidth, clientWidth} = document.documentElement;
        return [scrollWidth <= clientWidth, getComputedStyle(document.body).backgroundColor];"""
        fits, paper = browser.execute_script(style)
        assert fits and (int(re.search(r"\d+", paper)[0]) > 128) == (scheme == "light")
    finally:
        chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
