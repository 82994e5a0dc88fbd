// GRPO in the browser: a language model, how it is sampled, and how it learns. No library.
//
//   text -> encode -> forward -> sample -> score -> advantages -> gradient -> Adam
//
// The model is models/pico_base, a Qwen3 of 0.9M parameters. Every part names the file of the book
// that does the same in Python; tests/test_live.py holds the two together, number by number.
//
// How to read it: a tensor is a Float32Array, row after row, with its shape beside it in brackets.
// Sums are taken in 64 bits, which is what JavaScript computes in, and kept in 32.
//
// All of it stands inside one function, because a page that is opened from disk may load no file
// into a worker: page.js hands the worker this function's text instead.

"use strict";

function pico() {

const LAYERS = 4, D = 128, HEADS = 4, KV_HEADS = 2, d = 32, F = 384, VOCAB = 1024;
const GROUP = HEADS / KV_HEADS;       // so many heads of queries share one of keys and values (GQA)
const Q = HEADS * d, KV = KV_HEADS * d;
const EPS = 1e-6, THETA = 10000;      // of the norms; of RoPE
const RANK = 32, ALPHA = 64;          // LoRA: directions of each matrix that learn; how strongly
const SCALE = ALPHA / RANK;
// The matrices that learn, as [rows out, columns in]: y = W x.
const SHAPES = { q: [Q, D], k: [KV, D], v: [KV, D], o: [D, Q],
  gate: [F, D], up: [F, D], down: [D, F] };
const LINEAR = [];                    // "0.q", "0.k", … "3.down"
for (let layer = 0; layer < LAYERS; layer++)
  for (const name in SHAPES) LINEAR.push(`${layer}.${name}`);
const shapeOf = (name) => SHAPES[name.slice(2)];

// ------------------------------------------------------------------ numbers that travel as text

function bytesOf(base64) {
  const text = atob(base64), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

// bfloat16 is the upper half of a float32: put it there.
function fromBfloat16(bytes) {
  const halves = new Uint16Array(bytes.buffer), whole = new Uint32Array(halves.length);
  for (let i = 0; i < halves.length; i++) whole[i] = halves[i] << 16;
  return new Float32Array(whole.buffer);
}

// {name: weights} of the base. entries: [name, count] in the order of the bytes.
function unpackBase(base64, entries) {
  const all = fromBfloat16(bytesOf(base64)), base = {};
  let at = 0;
  for (const [name, count] of entries) base[name] = all.slice(at, at += count);
  return base;
}

// A snapshot's adapter. Per matrix: r scales of A's rows and r of B's columns (float32), then A and
// B as int8. Each of the r directions has its own scale.
function unpackAdapter(base64) {
  const bytes = bytesOf(base64), adapter = {};
  let at = 0;
  for (const name of LINEAR) {
    const [out, inn] = shapeOf(name);
    const A = new Float32Array(RANK * inn), B = new Float32Array(out * RANK);
    const scales = new Float32Array(bytes.slice(at, at += 8 * RANK).buffer);  // [2 r]
    const a = new Int8Array(bytes.buffer, at, A.length);
    const b = new Int8Array(bytes.buffer, at += A.length, B.length);
    at += B.length;
    for (let i = 0; i < A.length; i++) A[i] = Math.fround(a[i] * scales[Math.floor(i / inn)]);
    for (let i = 0; i < B.length; i++) B[i] = Math.fround(b[i] * scales[RANK + i % RANK]);
    adapter[name] = { A, B };         // A [r, in], B [out, r]
  }
  return adapter;
}

// ------------------------------------------------------------------- tokens (book: policy.py)

// vocab: [piece, score] each, its place is its id. added: {"<think>": 3, …}, which are never cut;
// special: those of them that end a turn or open one.
function tokenizer({ vocab, added, special, byteFrom }) {
  const known = new Map(vocab.map(([piece, score], id) => [piece, [score, id]]));
  const longest = Math.max(...vocab.map(([piece]) => piece.length));
  const worst = Math.min(...vocab.map(([, score]) => score)) - 10;  // of a letter without a piece

  // Unigram: the cut whose pieces have the highest total score (Viterbi); the first wins a draw.
  function cut(text) {
    const best = [{ score: 0 }];      // best[n]: of the first n characters
    for (let m = 0; m < text.length; m++) {
      if (!best[m]) continue;         // the middle of a character of two halves
      const width = text.codePointAt(m) > 0xffff ? 2 : 1;
      const offer = (n, score, id) => {
        score += best[m].score;
        if (!best[n] || score > best[n].score) best[n] = { score, id, from: m };
      };
      let single = false;
      for (let n = m + 1; n <= Math.min(text.length, m + longest); n++) {
        const found = known.get(text.slice(m, n));
        if (found) offer(n, ...found);
        if (found && n === m + width) single = true;
      }
      if (!single) offer(m + width, worst, -1);
    }
    const ids = [];
    for (let n = text.length; n > 0; n = best[n].from) {
      const bytes = new TextEncoder().encode(text.slice(best[n].from, n));
      ids.unshift(...(best[n].id >= 0 ? [best[n].id] : [...bytes].map((byte) => byteFrom + byte)));
    }
    return ids;
  }

  const escaped = Object.keys(added).map((t) => t.replace(/[|()/]/g, "\\$&"));
  const marks = new RegExp(`(${escaped.join("|")})`);
  const encode = (text) =>
    text.split(marks).flatMap((part) => part in added ? [added[part]] : cut(part));

  const isByte = (id) => id >= byteFrom && id < byteFrom + 256;
  function decode(ids) {
    let text = "";
    for (let i = 0; i < ids.length; i++) {
      if (!isByte(ids[i])) { text += vocab[ids[i]][0]; continue; }
      const bytes = [];
      for (; i < ids.length && isByte(ids[i]); i++) bytes.push(ids[i] - byteFrom);
      i--;
      const utf8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
      try { text += utf8.decode(new Uint8Array(bytes)); }
      catch { text += "\ufffd".repeat(bytes.length); }
    }
    return text;
  }

  // What would end a turn is broken up, "<|im_end|>" -> "< |im_end|>": what is typed stays text.
  const defang = (text) => special.reduce((t, s) => t.replaceAll(s, s[0] + " " + s.slice(1)), text);
  const prompt = (question) =>
    encode(`<|im_start|>user\n${defang(question)}<|im_end|>\n<|im_start|>assistant\n`);
  return { encode, decode, prompt, stop: added["<|im_end|>"] };
}

// ---------------------------------------------------------- the task (book: env_letters.py)

function question(text, letters) {
  const several = letters.length > 1;
  return `Count the ${several ? "letters" : "letter"} ${letters.join(", ")} in "${text}". ` +
    "Think first inside <think> and </think> if that helps. Then give the " +
    `${several ? "counts as JSON" : "count as a number"} inside <answer> and </answer>.`;
}

const countsOf = (text, letters) => letters.map((c) => text.split(c).length - 1);
const parts = (text, mark) => text.split(mark).length - 1;
const PYTHON_SPACE = "[\\s\\x1c-\\x1f\\x85]";  // what Python's strip() takes away
const strip = (text) => text.replace(new RegExp(`^${PYTHON_SPACE}+|${PYTHON_SPACE}+$`, "g"), "");

// [the thinking, what follows the last </think>]. If thinking never ends, nothing follows it.
function splitThinking(reply) {
  const at = reply.lastIndexOf("</think>");
  let before = at < 0 ? "" : reply.slice(0, at), after = at < 0 ? reply : reply.slice(at + 8);
  if (after.includes("<think>")) [before, after] = [reply, ""];
  return [before.replace("<think>", ""), after];
}

// The one well-formed answer: {letter: count}, or {"": count} if one letter was asked; else null.
function parseAnswer(reply, several) {
  const rest = splitThinking(reply)[1];
  if (parts(rest, "<answer>") !== 1 || parts(rest, "</answer>") !== 1) return null;
  const tail = rest.slice(rest.indexOf("<answer>") + 8), end = tail.indexOf("</answer>");
  const body = strip(tail.slice(0, Math.max(end, 0)));
  if (end < 0 || body.length > 1000) return null;
  if (!several) return /^[0-9]{1,6}$/.test(body) ? { "": Number(body) } : null;
  let found;
  try { found = JSON.parse(body); } catch { return null; }
  if (!body.startsWith("{")) return null;
  const bare = body.replace(/"(?:[^"\\]|\\.)*"/g, "_");           // without its strings
  if (parts(bare, "_") !== Object.keys(found).length) return null;  // a letter answered twice
  if (/[.eE]/.test(bare)) return null;                            // whole numbers only
  return Object.values(found).every((n) => typeof n === "number") ? found : null;
}

// "derives" spells the string with a tally, "states" names counts, "bare" answers at once.
function habitOf(reply) {
  const thought = splitThinking(reply)[0].slice(0, 10000);
  const items = thought.split(new RegExp(`${PYTHON_SPACE}+`)).filter(Boolean);
  if (!items.length) return "bare";
  const single = items.filter((item) => /^[a-z][0-9]*[,.:]?$/.test(item)).length;
  return single > items.length / 2 ? "derives" : "states";
}

// reward 1 if every count is right, else 0 (env_letters.py's "binary").
function score(text, letters, reply) {
  const several = letters.length > 1, truth = countsOf(text, letters);
  const answer = parseAnswer(reply, several);
  const key = (c) => several ? c : "";
  const said = (c) => answer && Object.hasOwn(answer, key(c)) ? answer[key(c)] : null;
  const complete = answer && (!several || Object.keys(answer).length === letters.length);
  const right = letters.map((c, i) => Boolean(complete) && said(c) === truth[i]);
  const reward = right.every(Boolean) ? 1 : 0;
  const format = answer ? 1 : 0;
  return { reward, format, habit: habitOf(reply), said: letters.map(said), truth, right };
}

// ------------------------------------------------------------------------------ arithmetic

// y[i, o] = Σ x[i, c] · w[o, c]: x [n, inner], w [out, inner] -> y [n, out]. Nearly all the time of
// this file goes by in here. Two rows and four outputs at once: each number that is fetched from
// memory is used in several sums.
function matmul(x, w, n, inner, out) {
  const y = new Float32Array(n * out);
  let i = 0;
  for (; i + 1 < n; i += 2) {
    const x0 = i * inner, x1 = x0 + inner;
    for (let o = 0; o < out; o += 4) {
      const w0 = o * inner, w1 = w0 + inner, w2 = w1 + inner, w3 = w2 + inner;
      let a0 = 0, a1 = 0, a2 = 0, a3 = 0, b0 = 0, b1 = 0, b2 = 0, b3 = 0;
      for (let c = 0; c < inner; c++) {
        const a = x[x0 + c], b = x[x1 + c];
        const p = w[w0 + c], q = w[w1 + c], r = w[w2 + c], s = w[w3 + c];
        a0 += a * p; a1 += a * q; a2 += a * r; a3 += a * s;
        b0 += b * p; b1 += b * q; b2 += b * r; b3 += b * s;
      }
      const y0 = i * out + o, y1 = y0 + out;
      y[y0] = a0; y[y0 + 1] = a1; y[y0 + 2] = a2; y[y0 + 3] = a3;
      y[y1] = b0; y[y1 + 1] = b1; y[y1 + 2] = b2; y[y1 + 3] = b3;
    }
  }
  if (i < n) {                        // the last row of an odd number
    const x0 = i * inner;
    for (let o = 0; o < out; o += 4) {
      const w0 = o * inner, w1 = w0 + inner, w2 = w1 + inner, w3 = w2 + inner;
      let a0 = 0, a1 = 0, a2 = 0, a3 = 0;
      for (let c = 0; c < inner; c++) {
        const a = x[x0 + c];
        a0 += a * w[w0 + c]; a1 += a * w[w1 + c]; a2 += a * w[w2 + c]; a3 += a * w[w3 + c];
      }
      const y0 = i * out + o;
      y[y0] = a0; y[y0 + 1] = a1; y[y0 + 2] = a2; y[y0 + 3] = a3;
    }
  }
  return y;
}

function transpose(x, rows, columns) {  // [rows, columns] -> [columns, rows]
  const y = new Float32Array(x.length);
  for (let i = 0; i < rows; i++)
    for (let j = 0; j < columns; j++) y[j * rows + i] = x[i * columns + j];
  return y;
}

function add(x, y) {                  // x += y
  for (let i = 0; i < x.length; i++) x[i] += y[i];
  return x;
}

// RMSNorm over rows of `width`: x / √(mean x² + ε) · weight.
function norm(x, weight, width) {
  const y = new Float32Array(x.length);
  for (let at = 0; at < x.length; at += width) {
    let squares = 0;
    for (let i = 0; i < width; i++) squares += x[at + i] * x[at + i];
    const c = 1 / Math.sqrt(squares / width + EPS);
    for (let i = 0; i < width; i++) y[at + i] = x[at + i] * c * weight[i];
  }
  return y;
}

// The gradient to x of a norm, given that to its result. The weight is frozen.
function normBackward(x, weight, width, dy) {
  const dx = new Float32Array(x.length);
  for (let at = 0; at < x.length; at += width) {
    let squares = 0, along = 0;
    for (let i = 0; i < width; i++) {
      squares += x[at + i] * x[at + i];
      along += dy[at + i] * weight[i] * x[at + i];
    }
    const c = 1 / Math.sqrt(squares / width + EPS), back = along * c * c * c / width;
    for (let i = 0; i < width; i++) dx[at + i] = dy[at + i] * weight[i] * c - x[at + i] * back;
  }
  return dx;
}

// RoPE, in place: the channels i and i + d/2 of a head turn by an angle that grows with the place
// of the token. sign -1 turns back, which is the gradient.
function rope(x, positions, heads, sign = 1) {
  const half = d / 2;
  for (let n = 0; n < positions.length; n++) {
    for (let i = 0; i < half; i++) {
      const angle = sign * positions[n] * THETA ** (-2 * i / d);
      const cos = Math.cos(angle), sin = Math.sin(angle);
      for (let h = 0; h < heads; h++) {
        const at = (n * heads + h) * d + i, a = x[at], b = x[at + half];
        x[at] = a * cos - b * sin;
        x[at + half] = b * cos + a * sin;
      }
    }
  }
  return x;
}

// ------------------------------------------------- the model: Qwen3 with LoRA (book: pico.py)

// The weights that the model computes with: W + α/r · B A (Hu et al. 2021). No adapter: W.
function fold(base, adapter) {
  const w = { ...base };
  if (adapter) {
    for (const name of LINEAR) {
      const [out, inn] = shapeOf(name), { A, B } = adapter[name];
      const change = matmul(B, transpose(A, RANK, inn), out, RANK, inn);  // [out, in]
      w[name] = base[name].map((x, i) => x + SCALE * change[i]);
    }
  }
  return w;
}

// Keys and values of what was read: [places, KV] per layer.
function newCache(places) {
  const empty = () => Array.from({ length: LAYERS }, () => new Float32Array(places * KV));
  return { keys: empty(), values: empty() };
}

// Run N tokens through the model; returns x [N, D], before the last norm. Their keys and values go
// into the cache, at `place`. A token sees the first `shared` places (the prompt of its group) and
// those from `begin` to its own (its reply so far).
//
//   place   0 … P-1      P … P+len₀-2    …          one prompt, read once,
//           the prompt | reply 0       | reply 1    and k replies that each see it and themselves
//
// step: {ids, place, position, begin, shared}, each Int32Array [N]. tape: a list to note what the
// gradient needs, if there is to be one.
function forward(w, step, cache, tape) {
  const N = step.ids.length;
  let x = new Float32Array(N * D);
  const row = (x, n, width) => x.subarray(n * width, (n + 1) * width);
  for (let n = 0; n < N; n++) x.set(row(w.embed, step.ids[n], D), n * D);
  for (let l = 0; l < LAYERS; l++) {
    const linear = (name, input) => {
      const [out, inn] = SHAPES[name];
      return matmul(input, w[`${l}.${name}`], N, inn, out);
    };
    const h = norm(x, w[`${l}.norm1`], D);                              // [N, D]
    const q0 = linear("q", h), k0 = linear("k", h), v = linear("v", h); // [N, Q], [N, KV] twice
    const q = rope(norm(q0, w[`${l}.q_norm`], d), step.position, HEADS);
    const k = rope(norm(k0, w[`${l}.k_norm`], d), step.position, KV_HEADS);
    for (let n = 0; n < N; n++) {
      cache.keys[l].set(row(k, n, KV), step.place[n] * KV);
      cache.values[l].set(row(v, n, KV), step.place[n] * KV);
    }
    const { y, p } = attend(q, cache.keys[l], cache.values[l], step);   // [N, Q]
    const x1 = add(linear("o", y), x);                                  // [N, D]
    const h1 = norm(x1, w[`${l}.norm2`], D);
    const gate = linear("gate", h1), up = linear("up", h1);             // [N, F]
    const a = new Float32Array(N * F);                                  // SiLU(gate) · up
    for (let i = 0; i < N * F; i++) a[i] = gate[i] / (1 + Math.exp(-gate[i])) * up[i];
    const x2 = add(linear("down", a), x1);
    if (tape) tape.push({ x, h, q0, k0, q, p, y, x1, h1, gate, up, a });
    x = x2;
  }
  return x;
}

const seenBy = (step, n) => step.shared[n] + step.place[n] - step.begin[n] + 1;  // how many tokens

// Softmax attention. Returns y [N, Q] and p, all the attention weights one after the other.
function attend(q, keys, values, step) {
  const N = step.ids.length, y = new Float32Array(N * Q);
  let total = 0;
  for (let n = 0; n < N; n++) total += HEADS * seenBy(step, n);
  const p = new Float32Array(total);
  for (let n = 0, at = 0; n < N; n++) {
    const seen = seenBy(step, n), shared = step.shared[n], skip = step.begin[n] - shared;
    for (let h = 0; h < HEADS; h++, at += seen) {
      const row = n * Q + h * d, head = Math.floor(h / GROUP) * d;
      let largest = -Infinity, sum = 0;
      for (let j = 0; j < seen; j++) {
        const from = (j < shared ? j : j + skip) * KV + head;
        let s = 0;
        for (let i = 0; i < d; i++) s += q[row + i] * keys[from + i];
        p[at + j] = s / Math.sqrt(d);
        if (p[at + j] > largest) largest = p[at + j];
      }
      for (let j = 0; j < seen; j++) sum += p[at + j] = Math.exp(p[at + j] - largest);
      for (let j = 0; j < seen; j++) {
        const from = (j < shared ? j : j + skip) * KV + head, weight = p[at + j] /= sum;
        for (let i = 0; i < d; i++) y[row + i] += weight * values[from + i];
      }
    }
  }
  return { y, p };
}

// Hidden states [M, D] -> logits [M, VOCAB]. The head is the embedding again (tied).
const head = (w, x, M) => matmul(norm(x, w.norm, D), w.embed, M, D, VOCAB);

// logits [VOCAB] -> log-probs, in nats, at a temperature (0: greedy, whose log-probs are at 1).
function logSoftmax(logits, temperature = 1) {
  const T = temperature || 1;
  let largest = -Infinity, sum = 0;
  for (let v = 0; v < logits.length; v++) if (logits[v] > largest) largest = logits[v];
  for (let v = 0; v < logits.length; v++) sum += Math.exp((logits[v] - largest) / T);
  const total = largest / T + Math.log(sum), logp = new Float64Array(logits.length);
  for (let v = 0; v < logits.length; v++) logp[v] = logits[v] / T - total;
  return logp;
}

// ---------------------------------------- sampling (book: rollout.py, fast/sampler.py)

// Random numbers in [0, 1), keyed by what is given, such as (seed, draw, sample): they do not depend
// on what was drawn before (mulberry32).
function randomOf(...key) {
  let state = 0x9e3779b9;
  for (const n of key) state = Math.imul(state ^ n, 0x85ebca6b) ^ (state >>> 13);
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

// Draw a token (policy.py: draw): the first at which the probabilities add up to more than u.
function draw(logp, temperature, u) {
  let best = 0;
  if (temperature === 0) {
    for (let v = 1; v < VOCAB; v++) if (logp[v] > logp[best]) best = v;
    return best;
  }
  let total = 0;
  for (let v = 0; v < VOCAB; v++) {
    total += Math.exp(logp[v]);
    if (total > u) return v;
  }
  return VOCAB - 1;                   // u is as good as 1
}

// k replies to one prompt. uniform[i] draws the random numbers of reply i. Each token is told as it
// comes, told(i, {id, logp, others}), others being the likeliest tokens; await pause() lets the
// page breathe, and stops the sampling when it returns true. Returns [{ids, logps, finished}].
async function sample(w, prompt, k, { temperature, maxTokens, stop, uniform, told, pause }) {
  const P = prompt.length, cache = newCache(P + k * maxTokens);
  const line = (n, value) => Int32Array.from({ length: n }, (_, i) => value(i));
  const numbers = line(P, (i) => i), zeros = line(P, () => 0);
  const read = { ids: line(P, (i) => prompt[i]), place: numbers, position: numbers, begin: zeros,
    shared: zeros };
  const last = forward(w, read, cache).slice((P - 1) * D);              // [1, D]
  let logits = head(w, last, 1), rows = line(k, (i) => i);              // rows: still talking
  const replies = Array.from({ length: k }, () => ({ ids: [], logps: [], finished: false }));
  for (let t = 0; t < maxTokens && rows.length; t++) {
    rows.forEach((i, n) => {
      const at = t === 0 ? 0 : n * VOCAB;                               // at first all are the same
      const logp = logSoftmax(logits.subarray(at, at + VOCAB), temperature);
      const id = draw(logp, temperature, temperature ? uniform[i]() : 0);
      replies[i].ids.push(id);
      replies[i].logps.push(logp[id]);
      replies[i].finished = id === stop;
      if (told) told(i, { id, logp: logp[id], others: likeliest(logp, 4) });
    });
    rows = rows.filter((i) => !replies[i].finished);                    // finished: dropped
    if (pause && await pause()) return null;
    if (!rows.length || t + 1 === maxTokens) break;
    const n = rows.length, begin = (r) => P + rows[r] * maxTokens;
    const step = { ids: line(n, (r) => replies[rows[r]].ids[t]), begin: line(n, begin),
      place: line(n, (r) => begin(r) + t), position: line(n, () => P + t),
      shared: line(n, () => P) };
    logits = head(w, forward(w, step, cache), n);                       // [n, VOCAB]
  }
  return replies;
}

function likeliest(logp, n) {
  const found = [];
  for (let v = 0; v < VOCAB; v++) {
    if (found.length === n && logp[v] <= logp[found[n - 1]]) continue;
    found.push(v);
    found.sort((a, b) => logp[b] - logp[a]);
    found.length = Math.min(found.length, n);
  }
  return found.map((id) => ({ id, logp: logp[id] }));
}

// ------------------------------------------------------ log-probs and GRPO (book: grpo.py)

// Where the tokens of a prompt and its replies lie when all are run at once. A reply's last token
// is only predicted, never read. Returns the step, and for each reply token what predicts it.
function layOut(prompt, replies) {
  const P = prompt.length, rows = [], predicts = [];
  prompt.forEach((id, i) => rows.push([id, i, i, 0, 0]));
  replies.forEach((reply, r) => {
    const begin = rows.length;
    reply.forEach((id, t) => {
      predicts.push({ from: t === 0 ? P - 1 : begin + t - 1, id, reply: r, t });
      if (t + 1 < reply.length) rows.push([id, begin + t, P + t, begin, P]);
    });
  });
  const column = (c) => Int32Array.from(rows, (row) => row[c]);
  const [ids, place, position, begin, shared] = [0, 1, 2, 3, 4].map(column);
  return { step: { ids, place, position, begin, shared }, predicts };
}

function gather(x, from) {            // rows of x [N, D] -> [M, D]
  const y = new Float32Array(from.length * D);
  from.forEach((n, m) => y.set(x.subarray(n * D, (n + 1) * D), m * D));
  return y;
}

// The log-probs of each reply's tokens, [k][length]: how likely a model finds what another said.
function logprobsOf(w, prompt, replies, temperature = 1) {
  const { step, predicts } = layOut(prompt, replies), found = replies.map(() => []);
  const x = forward(w, step, newCache(step.ids.length));                      // [N, D]
  const logits = head(w, gather(x, predicts.map((p) => p.from)), predicts.length);
  predicts.forEach(({ id, reply }, m) => {
    found[reply].push(logSoftmax(logits.subarray(m * VOCAB, (m + 1) * VOCAB), temperature)[id]);
  });
  return found;
}

// Rewards [k] -> advantages [k]: how much better than the group's mean, in units of its deviation.
function groupAdvantages(rewards) {
  const mean = rewards.reduce((a, b) => a + b) / rewards.length;
  const centered = rewards.map((r) => r - mean);
  const spread = Math.sqrt(centered.reduce((sum, c) => sum + c * c, 0) / rewards.length);
  return centered.map((c) => Math.abs(c) < 1e-9 ? 0 : c / (spread + 1e-6));
}

const CLIP = 0.2;                     // how far a step may push a token's probability, as a share
const MAX_GRAD_NORM = 1;              // a longer gradient is shortened to this

// The gradient of the GRPO loss to the adapter (grpo.py: update). replies: [{ids, logps}] as they
// were sampled, with the log-prob that each token had then.
function grpoGradient(base, adapter, prompt, replies, advantages, temperature = 1) {
  const w = fold(base, adapter), keep = replies.map((_, i) => i).filter((i) => advantages[i] !== 0);
  const said = keep.map((i) => replies[i].ids), { step, predicts } = layOut(prompt, said);
  const N = step.ids.length, M = predicts.length, cache = newCache(N), tape = [];
  const x = forward(w, step, cache, tape), from = predicts.map((p) => p.from);
  const xs = gather(x, from), logits = head(w, xs, M);                        // [M, D], [M, VOCAB]
  const dlogits = new Float32Array(M * VOCAB);
  let loss = 0, ratios = 0;
  predicts.forEach(({ id, reply, t }, m) => {
    const i = keep[reply], A = advantages[i];
    const logp = logSoftmax(logits.subarray(m * VOCAB, (m + 1) * VOCAB), temperature);
    const ratio = Math.exp(logp[id] - replies[i].logps[t]);  // how likely now, over how likely then
    const bounded = Math.min(Math.max(ratio, 1 - CLIP), 1 + CLIP);
    const isClipped = bounded * A < ratio * A;               // the smaller of the two counts (PPO)
    const weight = 1 / (replies.length * replies[i].ids.length);  // every reply weighs the same
    loss -= weight * Math.min(ratio * A, bounded * A);
    ratios += ratio / M;
    // d loss / d log p = -weight · A · ratio, and d log p[id] / d logits = 1[id] - p.
    const push = isClipped ? 0 : weight * A * ratio / temperature;
    for (let v = 0; v < VOCAB; v++) dlogits[m * VOCAB + v] = push * Math.exp(logp[v]);
    dlogits[m * VOCAB + id] -= push;
  });
  const dh = matmul(dlogits, transpose(w.embed, VOCAB, D), M, VOCAB, D);        // [M, D]
  const dxs = normBackward(xs, w.norm, D, dh);
  const dx = new Float32Array(N * D);
  from.forEach((n, m) => { for (let i = 0; i < D; i++) dx[n * D + i] += dxs[m * D + i]; });
  const dW = backward(w, step, cache, tape, dx);
  // W' = W + s · B A, so dA = s · Bᵀ dW' and dB = s · dW' Aᵀ.
  const gradient = {};
  for (const name of LINEAR) {
    const [out, inn] = shapeOf(name), { A, B } = adapter[name], g = dW[name];
    const dA = matmul(transpose(B, out, RANK), transpose(g, out, inn), RANK, out, inn);
    const dB = matmul(g, A, out, inn, RANK);                            // [out, r]
    gradient[name] = { A: dA.map((v) => SCALE * v), B: dB.map((v) => SCALE * v) };
  }
  return { gradient, loss, ratio: ratios, tokens: M };
}

// Back through the layers: dx [N, D], the loss's gradient to the last hidden states, gives dW of
// every matrix, {name: [out, in]}. Read it beside `forward`, from its last line to its first.
function backward(w, step, cache, tape, dx) {
  const N = step.ids.length, dW = {};
  for (let l = LAYERS - 1; l >= 0; l--) {
    const { x, h, q0, k0, q, p, y, x1, h1, gate, up, a } = tape[l];
    const linear = (name, dy, input) => {     // y = W x: dW = dyᵀ x, and dx = dy W is returned
      const [out, inn] = SHAPES[name];
      dW[`${l}.${name}`] = matmul(transpose(dy, N, out), transpose(input, N, inn), out, N, inn);
      return matmul(dy, transpose(w[`${l}.${name}`], out, inn), N, out, inn);
    };
    const da = linear("down", dx, a);                                         // [N, F]
    const dgate = new Float32Array(N * F), dup = new Float32Array(N * F);
    for (let i = 0; i < N * F; i++) {
      const s = 1 / (1 + Math.exp(-gate[i]));
      dgate[i] = da[i] * up[i] * s * (1 + gate[i] * (1 - s));
      dup[i] = da[i] * gate[i] * s;
    }
    const dh1 = add(linear("gate", dgate, h1), linear("up", dup, h1));
    const dx1 = add(normBackward(x1, w[`${l}.norm2`], D, dh1), dx);
    const dy = linear("o", dx1, y);                                           // [N, Q]
    const { dq, dk, dv } = attendBackward(dy, q, p, cache.keys[l], cache.values[l], step);
    const dq0 = normBackward(q0, w[`${l}.q_norm`], d, rope(dq, step.position, HEADS, -1));
    const dk0 = normBackward(k0, w[`${l}.k_norm`], d, rope(dk, step.position, KV_HEADS, -1));
    const dh = add(add(linear("q", dq0, h), linear("k", dk0, h)), linear("v", dv, h));
    dx = add(normBackward(x, w[`${l}.norm1`], D, dh), dx1);
  }
  return dW;
}

// The gradients to queries [N, Q], keys and values [N, KV]. Here token n lies at place n.
function attendBackward(dy, q, p, keys, values, step) {
  const N = step.ids.length, dq = new Float32Array(N * Q);
  const dk = new Float32Array(N * KV), dv = new Float32Array(N * KV), dp = new Float64Array(N);
  for (let n = 0, at = 0; n < N; n++) {
    const seen = seenBy(step, n), shared = step.shared[n], skip = step.begin[n] - shared;
    for (let h = 0; h < HEADS; h++, at += seen) {
      const row = n * Q + h * d, head = Math.floor(h / GROUP) * d;
      let mean = 0;                                                           // Σ p dp
      for (let j = 0; j < seen; j++) {
        const from = (j < shared ? j : j + skip) * KV + head, weight = p[at + j];
        let s = 0;
        for (let i = 0; i < d; i++) {
          s += dy[row + i] * values[from + i];
          dv[from + i] += weight * dy[row + i];
        }
        dp[j] = s;
        mean += weight * s;
      }
      for (let j = 0; j < seen; j++) {
        const from = (j < shared ? j : j + skip) * KV + head;
        const ds = p[at + j] * (dp[j] - mean) / Math.sqrt(d);
        for (let i = 0; i < d; i++) {
          dq[row + i] += ds * keys[from + i];
          dk[from + i] += ds * q[row + i];
        }
      }
    }
  }
  return { dq, dk, dv };
}

// ------------------------------------------------------- the optimizer (book: policy.py: adam)

const newAdam = () => ({ t: 0, m: {}, v: {} });

// One step of Adam (Kingma & Ba 2015) along a gradient that is shortened to MAX_GRAD_NORM. Returns
// the norm before that. adapter and adam are changed in place.
function adamStep(adapter, gradient, adam, lr, beta1 = 0.9, beta2 = 0.999, eps = 1e-8) {
  let squares = 0;
  for (const name of LINEAR)
    for (const part of ["A", "B"]) for (const g of gradient[name][part]) squares += g * g;
  const length = Math.sqrt(squares), shorten = Math.min(1, MAX_GRAD_NORM / (length + 1e-6));
  adam.t += 1;
  const c1 = 1 - beta1 ** adam.t, c2 = 1 - beta2 ** adam.t;
  for (const name of LINEAR) {
    for (const part of ["A", "B"]) {
      const w = adapter[name][part], g = gradient[name][part], key = name + part;
      const m = adam.m[key] ??= new Float32Array(w.length);
      const v = adam.v[key] ??= new Float32Array(w.length);
      for (let i = 0; i < w.length; i++) {
        const gi = g[i] * shorten;
        m[i] = beta1 * m[i] + (1 - beta1) * gi;
        v[i] = beta2 * v[i] + (1 - beta2) * gi * gi;
        w[i] -= lr * (m[i] / c1) / (Math.sqrt(v[i] / c2) + eps);
      }
    }
  }
  return length;
}

// An adapter to start from: A random, B zero, so that at first it changes nothing (policy.py).
function newAdapter(seed) {
  const random = randomOf(seed, 77), adapter = {};
  for (const name of LINEAR) {
    const [out, inn] = shapeOf(name);
    const A = Float32Array.from({ length: RANK * inn }, () => (2 * random() - 1) / Math.sqrt(inn));
    adapter[name] = { A, B: new Float32Array(out * RANK) };
  }
  return adapter;
}

const copyOf = (adapter) => Object.fromEntries(LINEAR.map((name) =>
  [name, { A: adapter[name].A.slice(), B: adapter[name].B.slice() }]));

return { LINEAR, unpackBase, unpackAdapter, tokenizer, question, score, fold, forward, head,
  newCache, randomOf, sample, logprobsOf, groupAdvantages, grpoGradient, adamStep, newAdam,
  newAdapter, copyOf };
}
