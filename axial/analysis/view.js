"use strict";

// The page of axial-analyze view. view.py writes the models, their photos, and the factors of the attention logits of
// blocks. This script multiplies the factors, takes the softmax and draws the weights. A block has one layer, or two:
// attention along the columns, and then along the rows. Its cells are the keys of its first layer, Y x X. A query is a
// pixel [y, x] of its last layer's map; a point is in pixels of the network's input. The form and the address have the
// state of the page.

const models = JSON.parse(document.getElementById("data").textContent);
const TERMS = {
  content: ["query · key", "scale"],
  query: ["query · position", "query_rows", "query_columns"],
  key: ["key · position", "key_rows", "key_columns"],
  saliency: ["key alone", "saliency"],
  position: ["position alone", "rows", "columns"],
  samples: ["samples", "sample_rows"],
};
const FATES = { matched: "#1b9e77", missed: "#ffb000", false: "#f0245e", "wrong class": "#9b5de5", excused: "#8a94a0" };
const LAYERS = { photo: "photo", prediction: "prediction", truth: "truth", errors: "truth" }; // what each needs
const COLORS = ["#0077bb", "#ee7733", "#009988", "#cc3311", "#33bbee", "#ee3377", "#a68a00", "#8866dd"];
const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
const form = document.getElementById("view");
let asked = new URLSearchParams(location.hash.slice(1));
let [queued, last] = [null, Promise.resolve()];

const byId = (id) => document.getElementById(id);
const range = (n) => [...Array(n).keys()];
const clamp = (value, last) => Math.max(0, Math.min(last, value));
const largest = (arrays) => arrays.flatMap((array) => [...array]).reduce((a, b) => Math.max(a, b));
const mean = (arrays) => arrays[0].map((_, i) => arrays.reduce((sum, array) => sum + array[i], 0) / arrays.length);
const percent = (part) => `${(100 * part).toFixed(1)}\u00a0%`;
const color = (head) => COLORS[head] ?? `hsl(${(head * 137.5) % 360} 65% 50%)`;
const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
const valueOf = (name) => new FormData(form).get(name);

function element(name, attributes, text, parent) {
  const space = ["path", "svg", "image", "text", "rect"].includes(name) ? "2000/svg" : "1999/xhtml";
  const made = document.createElementNS(`http://www.w3.org/${space}`, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  parent?.append(made);
  return made;
}

// === The data ===

// The 16-bit numbers of a text: base64 of deflated bytes, all high bytes first.
async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
  const count = planes.length / 2;
  return new Uint16Array(count).map((_, i) => (planes[i] << 8) | planes[count + i]);
}

async function openBlock(block) {
  if (block.layers[0].values) return;
  const numbers = new Int16Array((await unpack(block.data)).buffer);
  let start = 0;
  for (const layer of block.layers) {
    layer.values = {};
    for (const [name, { unit, shape }] of Object.entries(layer.arrays)) {
      const stop = start + shape.reduce((a, b) => a * b, 1);
      layer.values[name] = Float32Array.from(numbers.subarray(start, stop), (number) => number * unit);
      start = stop;
    }
    layer.terms = Object.keys(TERMS).filter((term) => TERMS[term].slice(1).some((name) => name in layer.values));
  }
}

async function openPhoto(photo) {
  if (photo.image) return;
  for (const name of ["prediction", "truth"]) if (photo[name]) photo[name] = await unpack(photo[name]);
  photo.image = element("img", { src: photo.photo });
  await photo.image.decode();
}

// === Attention ===

// The weights of a query's keys in one layer, in raster order: a column, a row or a map. `terms` is a set of TERMS.
function softmax({ values, stride, reach, depth, axis, queries, keys }, terms, head, [y, x]) {
  const [query, depths] = [(head * queries[0] + y) * queries[1] + x, range(depth)];
  const dot = (a, i, b, j) => depths.reduce((sum, d) => sum + a[i * depth + d] * b[j * depth + d], 0);
  // The part of a pixel in the samples of a deformable convolution, which are interpolated.
  const hat = (name, tap, at) => Math.max(0, 1 - Math.abs(values[name][query * depth + tap] - at));
  const near = (tap, row, column) => hat("sample_rows", tap, row) * hat("sample_columns", tap, column);
  const sampled = (...pixel) =>
    depths.reduce((sum, tap) => sum + values.masks[query * depth + tap] * near(tap, ...pixel), 0);
  const [zeroRow, zeroColumn] = keys.map((n, i) => head * (queries[i] + stride * (n - 1)) + stride * (n - 1));
  const logits = [];
  for (const row of axis === "width" ? [y] : range(keys[0])) {
    for (const column of axis === "height" ? [x] : range(keys[1])) {
      const key = (head * keys[0] + row) * keys[1] + column;
      const down = axis === "width" ? 0 : y - stride * row;
      const right = axis === "height" ? 0 : x - stride * column;
      const sides = { rows: zeroRow + down, columns: zeroColumn + right };
      let logit = 0;
      if (terms.has("content")) logit += values.scale[head] * dot(values.query, query, values.key, key);
      if (terms.has("saliency")) logit += values.saliency[key];
      if (terms.has("samples")) logit += Math.log(sampled(row, column));
      for (const side in sides) {
        const [forQuery, forKey, alone] = [`query_${side}`, `key_${side}`, side].map((name) => values[name]);
        if (forQuery && terms.has("query")) logit += dot(values.query, query, forQuery, sides[side]);
        if (forKey && terms.has("key")) logit += dot(values.key, key, forKey, sides[side]);
        if (alone && terms.has("position")) logit += alone[sides[side]];
      }
      logits.push(Math.max(Math.abs(down), Math.abs(right)) > reach ? -Infinity : logit);
    }
  }
  const top = largest([logits]);
  const weights = Float64Array.from(logits, (logit) => Math.exp(logit - top));
  const total = weights.reduce((a, b) => a + b);
  return weights.map((weight) => weight / total);
}

// The map of a query, and the weights of each head along the query's row and column. A chosen head -1 is the mean.
function attend({ layers, step, heads }, terms, [y, x], chosen) {
  const [first, second] = layers;
  const [Y, X] = first.keys;
  const every = (layer, query) => range(heads).map((head) => softmax(layer, terms, head, query));
  const one = (layer, query, head) => (head < 0 ? mean(every(layer, query)) : softmax(layer, terms, head, query));
  const map = new Float64Array(Y * X);
  if (second) {
    one(second, [y, x], chosen.row).forEach((weight, j) => {
      one(first, [y * step, j], chosen.column).forEach((below, i) => (map[i * X + j] = weight * below));
    });
    return { map, rows: every(second, [y, x]), columns: every(first, [y * step, x]), Y, X };
  }
  const maps = every(first, [y, x]);
  const [rows, columns] = [X, Y].map((n) => maps.map(() => new Float64Array(n)));
  maps.forEach((weights, head) => {
    weights.forEach((weight, cell) => {
      rows[head][cell % X] += weight;
      columns[head][Math.floor(cell / X)] += weight;
    });
  });
  return { map: chosen.column < 0 ? mean(maps) : maps[chosen.column], maps, rows, columns, Y, X };
}

// === Queries and cells on the canvas ===

// The point at the centre of a query.
function centre({ layers, step }, photo, [y, x]) {
  return [y * step, x].map((position, i) => ((position + 0.5) / layers[0].queries[i]) * photo.canvas[i]);
}

// The query nearest to a point. Queries in the padding are left out.
function nearest({ layers, step }, photo, point) {
  return point.map((pixel, i) => {
    const query = (at) => ((at / photo.canvas[i]) * layers[0].queries[i] - 0.5) / (i ? 1 : step);
    return clamp(Math.round(query(pixel)), Math.max(0, Math.floor(query(photo.valid[i] - 0.01))));
  });
}

// For each cell, the fraction of its pixels in the padding, on the segment at a point, and on segments of its class.
function fractions({ layers }, photo, [y, x]) {
  const { stride, queries, keys } = layers[0];
  const [h, w] = photo.valid;
  const places = photo.canvas.map((side, i) => {
    const cell = (pixel) => Math.floor((((pixel + 0.5) / side) * queries[i] - 0.5) / stride + 0.5);
    return range(side).map((pixel) => clamp(cell(pixel), keys[i] - 1));
  });
  const id = photo.prediction?.[Math.floor(y) * w + Math.floor(x)];
  const alike = photo.objects?.map((object) => object.class === photo.objects[id - 1]?.class) ?? [];
  const [all, padding, own, same] = range(4).map(() => new Float64Array(keys[0] * keys[1]));
  places[0].forEach((row, i) => {
    places[1].forEach((column, j) => {
      const cell = row * keys[1] + column;
      const outside = i >= h || j >= w;
      const label = outside ? 0 : photo.prediction?.[i * w + j];
      all[cell] += 1;
      padding[cell] += outside;
      own[cell] += Boolean(label && label === id);
      same[cell] += Boolean(alike[label - 1]);
    });
  });
  return [padding, own, same].map((part) => part.map((count, cell) => count / all[cell]));
}

// === Drawing ===

function painted(width, height, pixel) {
  const canvas = element("canvas", { width, height });
  const image = new ImageData(width, height);
  for (let i = 0; i < width * height; i++) image.data.set(pixel(i), 4 * i);
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

// The segments of a layer in their own colours, or in those of their fates. Missed ones lie over the others.
function segments(photo, layer) {
  const [h, w] = photo.valid;
  const [front, objects] = layer === "truth" ? [photo.truth, photo.truths] : [photo.prediction, photo.objects];
  const bad = (object) => ["missed", "false", "wrong class"].includes(object?.fate);
  return painted(w, h, (i) => {
    const object = objects[front[i] - 1];
    const lost = layer === "errors" ? photo.truths[photo.truth[i] - 1] : null;
    if (bad(lost) && !bad(object)) return [...rgb(FATES[lost.fate]), 190];
    if (!object || (layer === "errors" && object.fate === "matched" && !object.thing)) return [0, 0, 0, 0];
    if ((i % w && front[i - 1] !== front[i]) || (i >= w && front[i - w] !== front[i])) return [255, 255, 255, 230];
    return layer === "errors" ? [...rgb(FATES[object.fate]), 150] : [...rgb(object.color), 110];
  });
}

// Draws the photo, hatched padding, a layer, and the weights of cells divided by `top` on a canvas.
function paint(canvas, { block, photo }, layer, cells, top) {
  const [[H, W], [h, w]] = [photo.canvas, photo.valid];
  const scale = Math.max(1, Math.round(960 / W));
  [canvas.width, canvas.height] = [W * scale, H * scale];
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.fillStyle = "#c9ced6";
  context.fillRect(0, 0, W, H);
  context.strokeStyle = "#8f99a6";
  for (let i = -H; i < W; i += 10) context.stroke(new Path2D(`M${i} ${H}L${i + H} 0`));
  context.drawImage(photo.image, 0, 0, w, h);
  if (layer !== "photo") context.drawImage((photo[`${layer} colors`] ??= segments(photo, layer)), 0, 0);
  const strength = valueOf("strength") / 100;
  if (!cells || !strength) return context;
  context.fillStyle = `rgba(10, 8, 30, ${0.35 * strength})`;
  context.fillRect(0, 0, w, h);
  const { stride, queries, keys } = block.layers[0];
  const heat = painted(keys[1], keys[0], (i) => {
    const value = clamp(cells[i] / top, 1);
    const heated = [51 + 306 * value, 255 * value ** 1.6, 100 * (1 - value) + 164 * value ** 6];
    return [...heated, 255 * strength * Math.min(1, 1.3 * value ** 0.7)];
  });
  const [y, x] = photo.canvas.map((side, i) => ((1 - stride) / 2 / queries[i]) * side);
  const [tall, wide] = photo.canvas.map((side, i) => (stride * keys[i] * side) / queries[i]);
  context.drawImage(heat, x, y, wide, tall);
  return context;
}

function drawCross(context, [y, x], height, width) {
  for (const [style, line] of Object.entries({ "#000": 6, "#4df3ff": 2.5 })) {
    context.strokeStyle = style;
    context.lineWidth = line / context.getTransform().a;
    context.stroke(new Path2D(`M${x - width} ${y}H${x + width}M${x} ${y - height}V${y + height}`));
  }
}

// Lines of weights beside the photo: one for each head, with 0 at the photo. Returns the largest weight.
function drawLines(svg, lines, at, chosen) {
  const [along, length, top] = [svg.classList.contains("along"), lines[0].length, largest(lines)];
  svg.setAttribute("viewBox", along ? `0 0 ${length} 1` : `0 0 1 ${length}`);
  svg.setAttribute("aria-label", `${along ? "Row" : "Column"}: the weights of each head, up to ${percent(top)}`);
  svg.replaceChildren();
  element("path", { class: "query", d: along ? `M${at + 0.5} 0V1` : `M0 ${at + 0.5}H1` }, "", svg);
  lines.forEach((line, head) => {
    const points = Array.from(line, (weight, i) => [i + 0.5, (0.96 * weight) / top]);
    const d = `M${points.map((point) => (along ? point : point.reverse()).join(" ")).join("L")}`;
    const opacity = chosen < 0 || chosen === head ? 1 : 0.15;
    element("path", { stroke: color(head), opacity, d }, "", svg);
  });
  return top;
}

// === Controls ===

// Replaces the radio buttons or check boxes of a fieldset. Those that the address asks for are checked.
function chips(fieldset, type, name, options) {
  fieldset.replaceChildren(fieldset.querySelector("legend"));
  for (const { value, text, swatch, picture } of options) {
    const label = element("label", { class: "chip" }, "", fieldset);
    const input = element("input", { type, name, value }, "", label);
    const first = type === "checkbox" || value === options[0].value;
    input.checked = asked.has(name) ? asked.getAll(name).includes(String(value)) : first;
    if (swatch) element("i", { style: `--color: ${swatch}` }, "", label);
    if (picture) element("img", { src: picture, alt: "" }, "", label);
    element("span", {}, text, label);
  }
  if (type === "checkbox") element("input", { type: "hidden", name, value: "" }, "", fieldset);
  else if (!fieldset.querySelector(":checked")) fieldset.querySelector("input").checked = true;
}

function makeControls() {
  const photos = models[0].photos.map(({ name, photo }, value) => ({ value, text: name, picture: photo }));
  chips(byId("photos"), "radio", "photo", photos);
  const all = models.flatMap((model) => model.photos);
  const layers = Object.keys(LAYERS).filter((layer) => all.some((photo) => photo[LAYERS[layer]]));
  const named = layers.map((value) => ({ value, text: value }));
  chips(byId("layers"), "radio", "layer", named);
  form.elements.strength.value = asked.get("strength") ?? 80;
  form.elements.query.value = asked.get("query") ?? "";
}

function makePanel(model, index) {
  const root = byId("panel").content.cloneNode(true).firstElementChild;
  byId("panels").append(root);
  const find = (selector) => root.querySelector(selector);
  const panel = { model, index, find };
  find("h2").textContent = model.name;
  find("select").name = `block${index}`;
  const canvas = find("canvas");
  const moveTo = (point) => {
    form.elements.query.value = point.map((pixel, i) => clamp(pixel / panel.photo.valid[i], 0.9999).toFixed(4));
    update();
  };
  const follow = (event) => {
    const box = canvas.getBoundingClientRect();
    const parts = [(event.clientY - box.top) / box.height, (event.clientX - box.left) / box.width];
    const point = parts.map((part, i) => part * panel.photo.canvas[i]);
    if (event.buttons) moveTo(point);
    else find(".object").textContent = describe(panel.photo, point);
  };
  canvas.addEventListener("pointerdown", follow);
  canvas.addEventListener("pointermove", follow);
  canvas.addEventListener("keydown", (event) => {
    if (!(event.key in ARROWS)) return;
    event.preventDefault();
    const { block, photo, query } = panel;
    const next = centre(block, photo, [query[0] + ARROWS[event.key][0], query[1] + ARROWS[event.key][1]]);
    moveTo(centre(block, photo, nearest(block, photo, next)));
  });
  return panel;
}

// Opens the photo and the block that the form chooses. Makes the controls of a block that the panel did not show.
async function openPanel(panel) {
  const { model, index, find } = panel;
  panel.photo = model.photos[valueOf("photo")];
  await openPhoto(panel.photo);
  const { blocks } = panel.photo;
  const name = panel.controls ? valueOf(`block${index}`) : asked.get(`block${index}`);
  panel.block = blocks.find((block) => block.name === name) ?? blocks.at(-1);
  await openBlock(panel.block);
  const { layers, heads } = panel.block;
  if (panel.controls === panel.block.name) return;
  panel.controls = panel.block.name;
  find("select").replaceChildren(...blocks.map((block) => new Option(block.name)));
  find("select").value = panel.block.name;
  find(".columns legend").textContent = layers[1] ? "Column head" : "Head";
  find(".rows").hidden = !layers[1];
  const options = range(heads).map((value) => ({ value, text: value + 1, swatch: color(value) }));
  for (const side of ["column", "row"]) {
    chips(find(`.${side}s`), "radio", `${side}${index}`, [{ value: -1, text: "mean" }, ...options]);
  }
  const terms = Object.keys(TERMS).filter((term) => layers.some((layer) => layer.terms.includes(term)));
  const named = terms.map((value) => ({ value, text: TERMS[value][0] }));
  chips(find(".terms"), "checkbox", `terms${index}`, named);
}

// What is at a point, as text.
function describe(photo, [y, x]) {
  const [h, w] = photo.valid;
  if (y < 0 || x < 0 || y >= h || x >= w) return "padding";
  const pixel = Math.floor(y) * w + Math.floor(x);
  const about = (object, kind, other) => {
    if (!object) return [];
    const facts = [`${kind} ${object.id}: ${object.class}`, `area ${object.area}`];
    if ("score" in object) facts.push(`score ${object.score.toFixed(2)}`);
    if (object.fate) facts.push(object.fate);
    if (object.other) facts.push(`IoU ${object.iou.toFixed(2)} with ${other} ${object.other}`);
    return facts.join(", ");
  };
  const predicted = about(photo.objects?.[photo.prediction[pixel] - 1], "segment", "true segment");
  const true_ = about(photo.truths?.[photo.truth[pixel] - 1], "true segment", "segment");
  return [predicted, true_].flat().join("; ") || "no segment";
}

// Shows a panel's map, lines and figures for the query. Returns a sentence about them.
function showPanel(panel) {
  const { block, photo, find, index } = panel;
  const chosen = { row: Number(valueOf(`row${index}`)), column: Number(valueOf(`column${index}`)) };
  const terms = new Set(new FormData(form).getAll(`terms${index}`));
  const given = valueOf("query").split(",").map(Number);
  const parts = given.length === 2 && given.every(Number.isFinite) ? given : photo.start;
  const at = [parts[0] * photo.valid[0], parts[1] * photo.valid[1]];
  const query = nearest(block, photo, at);
  const shown = attend(block, terms, query, chosen);
  const [top, mark] = [largest([shown.map]), photo.canvas[0] / 30];
  Object.assign(panel, { at, query, shown, terms });
  const layer = photo[LAYERS[valueOf("layer")]] ? valueOf("layer") : "photo";
  drawCross(paint(find("canvas"), panel, layer, shown.map, top), at, mark, mark);
  const row = query[0] * block.step;
  const column = drawLines(find(".down"), shown.columns, row, chosen.column);
  const along = drawLines(find(".along"), shown.rows, query[1], shown.maps ? chosen.column : chosen.row);
  find("small").textContent = `↑ up to ${percent(column)}\n← up to ${percent(along)}`;

  const cells = fractions(block, photo, at);
  const body = find("tbody");
  body.replaceChildren();
  const add = (name, weights, cellOf, head, selected) => {
    const line = element("tr", { class: selected === head ? "chosen" : "" }, "", body);
    const title = element("th", { scope: "row" }, "", line);
    if (head !== undefined) element("i", { style: `--color: ${color(head)}` }, "", title);
    title.append(name);
    return cells.map((cell) => {
      const total = weights.reduce((sum, weight, i) => sum + weight * cell[cellOf(i)], 0);
      return element("td", {}, percent(total), line).textContent;
    });
  };
  const [padding, own, same] = add("map shown", shown.map, (i) => i);
  add("even weights", attend(block, new Set(), query, chosen).map, (i) => i, undefined, null);
  const columnHead = ["column head", shown.columns, (i) => i * shown.X + query[1], chosen.column];
  const rowHead = ["row head", shown.rows, (j) => row * shown.X + j, chosen.row];
  const sets = shown.maps ? [["head", shown.maps, (i) => i, chosen.column]] : [columnHead, rowHead];
  for (const [side, lines, cellOf, selected] of sets) {
    lines.forEach((weights, head) => add(`${side} ${head + 1}`, weights, cellOf, head, selected));
  }
  find(".note").textContent = [photo.name, photo.summary, photo.note].filter(Boolean).join(". ");
  find(".key").replaceChildren();
  for (const fate of layer === "errors" ? Object.keys(FATES) : []) {
    const label = element("span", {}, "", find(".key"));
    element("i", { style: `--color: ${FATES[fate]}` }, "", label);
    const listed = fate === "missed" ? photo.truths : photo.objects;
    label.append(`${fate}: ${listed.filter((object) => object.fate === fate).length}`);
  }
  const what = (find(".object").textContent = describe(photo, at));
  return (
    `${panel.model.name}, ${block.name}: the query in row ${query[0] + 1}, column ${query[1] + 1} is on ${what}. ` +
    `Largest weight of a cell: ${percent(top)}. ` +
    `Weight on padding: ${padding}, on the query's segment: ${own}, on its class: ${same}.`
  );
}

// Shows the state of the form, once for all changes that come while the page works.
function update() {
  queued ??= last = last.then(show, show);
  return queued;
}

async function show() {
  queued = null;
  for (const panel of panels) await openPanel(panel);
  byId("status").textContent = panels.map(showPanel).join(" ");
  asked = new URLSearchParams(new FormData(form));
  history.replaceState(null, "", `#${asked}`);
}

// === The figure ===

// Rows of pictures (title, canvas), as in Fig. 7 and 8 of Axial-DeepLab: the photo with the query, and each column head
// for the queries in the query's row; the map, and each row head for the queries in its column. A single layer has the
// query's maps. The pictures of a row of heads have one scale.
function pictures(panel) {
  const { block, photo, at, query, shown, terms, model } = panel;
  const { layers, step, heads, name } = block;
  const { Y, X } = shown;
  const [H, W] = photo.canvas;
  const draw = (title, cells, top, tall, wide) => {
    const canvas = element("canvas", {});
    drawCross(paint(canvas, panel, "photo", cells, top), at, tall, wide);
    return [title, canvas];
  };
  const each = (side, maps, tall, wide) =>
    maps.map((cells, head) => draw(`${side} ${head + 1}`, cells, largest(maps), tall, wide));
  const start = draw(model.name, null, 1, H / 30, H / 30);
  const map = draw(`${name}: map`, shown.map, largest([shown.map]), H / 30, H / 30);
  if (shown.maps) return [[start, map, ...each("head", shown.maps, H / 30, H / 30)]];
  const columns = range(heads).map((head) => {
    const lines = range(X).map((x) => softmax(layers[0], terms, head, [query[0] * step, x]));
    return new Float64Array(Y * X).map((_, cell) => lines[cell % X][Math.floor(cell / X)]);
  });
  const rows = range(heads).map((head) => {
    const lines = range(layers[1].queries[0]).map((y) => softmax(layers[1], terms, head, [y, query[1]]));
    return new Float64Array(Y * X).map((_, cell) => lines[Math.floor(cell / X / step)][cell % X]);
  });
  return [
    [start, ...each("column head", columns, 0, W)],
    [map, ...each("row head", rows, H, 0)],
  ];
}

async function saveFigure(kind) {
  const lines = panels.flatMap(pictures);
  const side = 240;
  const width = Math.max(...lines.map((line) => line.length)) * side;
  const svg = element("svg", { width });
  const paper = element("rect", { width, fill: "#fff" }, "", svg);
  let y = 0;
  for (const line of lines) {
    const height = (side * line[0][1].height) / line[0][1].width;
    line.forEach(([title, canvas], i) => {
      const box = { x: i * side + 4, y: y + 30, width: side - 8, height: height - 8 };
      element("text", { x: box.x, y: y + 22, "font-family": "sans-serif", "font-size": 15 }, title, svg);
      element("image", { ...box, href: canvas.toDataURL("image/png") }, "", svg);
    });
    y += height + 26;
  }
  [svg, paper].forEach((whole) => whole.setAttribute("height", y + 4));
  let href = `data:image/svg+xml,${encodeURIComponent(new XMLSerializer().serializeToString(svg))}`;
  if (kind === "png") {
    const image = element("img", { src: href });
    await image.decode();
    const canvas = element("canvas", { width: 2 * width, height: 2 * y + 8 });
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    href = canvas.toDataURL("image/png");
  }
  element("a", { href, download: `attention.${kind}` }).click();
}

const panels = models.map(makePanel);
makeControls();
form.addEventListener("input", update);
byId("svg").addEventListener("click", () => saveFigure("svg"));
byId("png").addEventListener("click", () => saveFigure("png"));
window.addEventListener("hashchange", () => location.reload());
update();
