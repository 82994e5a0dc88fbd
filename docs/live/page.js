// The page around model.js: what is asked, drawn and clicked. The arithmetic runs in a worker, so
// that the page answers while it computes; where no worker is to be had, it runs here, in slices.
//
//   index.html     what stands on the page        data/run.js     the run: its numbers, its tasks
//   model.js       the model and GRPO             data/base.js    the weights of the base
//   page.js        this                           data/0012.js    the adapter after update 12
//
// Whatever a person types or a model says goes into the page as text (textContent), never as HTML.

"use strict";

// ------------------------------------------------------------------------- the worker's side

// Answers messages {job, what, …} with {job, tokens} while it samples and {job, done} at the end.
// tell(message) sends one back. It keeps the weights, and the policy that is trained in the page.
function serve(model, tell) {
  const adapters = {}, folded = {};
  const wanted = {};                  // of each part of the page, its newest job: older ones stop
  let base, tokens;
  let own = null, undo = [];          // own: {adapter, adam}

  const weightsOf = (name) => {
    if (name === "own") return own.folded ??= model.fold(base, own.adapter);
    return folded[name] ??= model.fold(base, adapters[name]);
  };
  let breath = 0;
  const pause = (job, part, news) => () => {  // now and then, tell what is new and let messages in
    if (performance.now() - breath < 40) return false;
    if (news.length) tell({ job, tokens: news.splice(0) });
    return new Promise((go) => setTimeout(() => {
      breath = performance.now();
      go(job < wanted[part]);
    }, 0));
  };

  const can = {
    load({ base64, entries, tokenizer }) {
      base = model.unpackBase(base64, entries);
      tokens = model.tokenizer(tokenizer);
    },
    adapter({ name, base64 }) { adapters[name] = model.unpackAdapter(base64); },
    // k replies to a question, or null if that part of the page has asked for something else since
    async sample({ job, part, name, question, k, temperature, maxTokens, seed }) {
      wanted[part] = job;
      const prompt = tokens.prompt(question), started = performance.now();
      const uniform = Array.from({ length: k }, (_, i) => model.randomOf(...seed, i)), news = [];
      const replies = await model.sample(weightsOf(name), prompt, k, {
        temperature, maxTokens, uniform, stop: tokens.stop,
        told: (i, token) => news.push({ i, ...token }), pause: pause(job, part, news),
      });
      if (!replies) return null;
      tell({ job, tokens: news });
      return { replies, prompt, seconds: (performance.now() - started) / 1000 };
    },
    // how likely another snapshot finds the same replies, token by token
    logprobs({ name, prompt, replies, temperature }) {
      return model.logprobsOf(weightsOf(name), prompt, replies, temperature);
    },
    start({ name, seed }) {           // the policy to train: a copy of a snapshot
      const adapter = adapters[name] ? model.copyOf(adapters[name]) : model.newAdapter(seed);
      own = { adapter, adam: model.newAdam() };
      undo = [];
    },
    step({ prompt, replies, advantages, temperature, lr }) {
      const started = performance.now();
      const copyAll = (moments) =>
        Object.fromEntries(Object.entries(moments).map(([key, x]) => [key, x.slice()]));
      undo.push({ adapter: model.copyOf(own.adapter),
        adam: { t: own.adam.t, m: copyAll(own.adam.m), v: copyAll(own.adam.v) } });
      if (undo.length > 12) undo.shift();
      const found = model.grpoGradient(base, own.adapter, prompt, replies, advantages, temperature);
      const norm = model.adamStep(own.adapter, found.gradient, own.adam, lr);
      own.folded = null;
      const { loss, ratio, tokens } = found, seconds = (performance.now() - started) / 1000;
      const said = replies.map((reply) => reply.ids);
      const now = model.logprobsOf(weightsOf("own"), prompt, said, temperature);
      return { loss, ratio, tokens, norm, seconds, now, undoable: undo.length };
    },
    undo() {
      own = undo.pop();
      return { undoable: undo.length };
    },
  };
  return async (message) => {
    try { tell({ job: message.job, done: await can[message.what](message) }); }
    catch (error) { tell({ job: message.job, failed: String(error) }); }
  };
}

// --------------------------------------------------------------------------- the page's side

const one = (selector) => document.querySelector(selector);
if (typeof LIVE === "undefined" || typeof pico === "undefined") {
  const missing = "The page lacks model.js or data/run.js: keep its folder together.";
  one("#problem").textContent = missing;
  throw new Error(missing);
}
const model = pico();
const jobs = new Map();
let lastJob = 0, post, inWorker = true;

function heard({ job, tokens, done, failed }) {
  const asked = jobs.get(job);
  if (!asked) return;
  if (tokens) return tokens.forEach((token) => asked.told?.(token));
  jobs.delete(job);
  if (failed) asked.fail(new Error(failed)); else asked.go(done);
}

function startEngine() {
  const here = () => {
    inWorker = false;
    const answer = serve(model, heard);
    post = (message) => setTimeout(() => answer(message), 0);
  };
  try {
    const source = `"use strict";\n${pico}\n${serve}\n` +
      "const answer = serve(pico(), (m) => postMessage(m)); onmessage = (e) => answer(e.data);";
    const worker = new Worker(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
    const unanswered = [];            // until the worker's first word: some browsers refuse it late
    post = (message) => { unanswered.push(message); worker.postMessage(message); };
    worker.onmessage = (e) => {
      post = (message) => worker.postMessage(message);
      worker.onmessage = (later) => heard(later.data);
      worker.onerror = (error) => fail(error);
      heard(e.data);
    };
    worker.onerror = () => { here(); unanswered.forEach(post); };
  } catch { here(); }
}

// Ask the engine; told(token) hears of each token. Returns a promise of the answer.
function ask(what, more = {}, told) {
  const job = ++lastJob;
  return new Promise((go, fail) => {
    jobs.set(job, { go, fail, told });
    post({ job, what, ...more });
  });
}

const scripts = {};
const script = (name) => scripts[name] ??= new Promise((go, fail) => {
  const tag = document.createElement("script");
  tag.src = `data/${name}.js`;
  tag.onload = go;
  tag.onerror = () => fail(new Error(`data/${name}.js could not be read`));
  document.head.append(tag);
});

const sent = {};
const ready = (name) => sent[name] ??= name === "base" ? Promise.resolve()
  : script(name).then(() => ask("adapter", { name, base64: LIVE.adapters[name] }));

// ------------------------------------------------------------------------------ small things

function make(tag, { text, ...more } = {}, ...inside) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  for (const [name, value] of Object.entries(more)) element.setAttribute(name, value);
  element.append(...inside);
  return element;
}
function draw(tag, more = {}, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(more)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}
const sum = (values) => values.reduce((a, b) => a + b, 0);
const percent = (p, digits = 0) => `${(100 * p).toFixed(digits)}%`;
const HABITS = { derives: "spells it out", states: "states the counts", bare: "answers at once" };
const tokens = model.tokenizer(LIVE.tokenizer);
const visible = (id) => tokens.decode([id]).replaceAll("\n", "↵\n");
const named = (id) => tokens.decode([id]).replaceAll("\n", "↵").replaceAll(" ", "␣");
const momentOf = (stop) =>
  stop.update < 0 ? "the base" : stop.update === 0 ? "after SFT" : `update ${stop.update}`;
const longMoment = (stop) => stop.update < 0 ? "the base, before anything"
  : stop.update === 0 ? "after SFT, before RL" : `after update ${stop.update} of ${LIVE.updates}`;
const fail = (error) => { one("#problem").textContent = `Something went wrong: ${error.message}`; };

// ------------------------------------------------------------------------------ the question

const FIRST = 1;                      // the task to begin with: that before it is often guessed
let task;                             // {text, letters: [...]}
const asText = () => model.question(task.text, task.letters);

function readTask() {
  const text = one("#text").value;
  const letters = [...new Set([...one("#letters").value.replace(/[\s,]/g, "")])];
  if (!text || !letters.length) return false;
  task = { text, letters };
  const usual = /^[a-z]{1,80}$/.test(text) && letters.every((c) => /[a-z]/.test(c));
  one("#unusual").hidden = usual;
  return true;
}

function showTask(number) {
  const n = number % LIVE.tasks.length, [text, letters] = LIVE.tasks[n];
  one("#text").value = text;
  one("#letters").value = letters;
  one("#which").textContent = `Development task ${n + 1} of ${LIVE.tasks.length}: its seed is ` +
    `${LIVE.eval_seeds + n}, and no training has seen it.`;
  readTask();
}

// -------------------------------------------------------------------- a reply, token by token

const FULL = Math.log(4);             // a change of this many nats has the full colour

// A box of coloured tokens. Arrow keys go from one to the next; the one in focus is told about.
class Reply {
  constructor(box, about) {
    this.box = box;
    this.about = about;
    this.clear();
    box.addEventListener("keydown", (e) => {
      const way = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
      const at = this.spans.indexOf(document.activeElement);
      if (!way || at < 0) return;
      e.preventDefault();
      this.spans[Math.min(Math.max(at + way, 0), this.spans.length - 1)].focus();
    });
    box.addEventListener("focusin", (e) => this.choose(this.spans.indexOf(e.target)));
    box.addEventListener("pointerover", (e) => this.choose(this.spans.indexOf(e.target)));
  }
  clear() {
    this.tokens = [];
    this.spans = [];
    this.box.replaceChildren();
  }
  push(token) {
    const end = token.id === tokens.stop;
    const text = end ? "■" : visible(token.id), tabindex = this.spans.length ? -1 : 0;
    const span = make("span", { class: end ? "token end" : "token", text, tabindex });
    this.tokens.push(token);
    this.spans.push(span);
    this.box.append(span);
    this.colour(this.spans.length - 1);
  }
  colour(i) {
    const { logp, before } = this.tokens[i], span = this.spans[i];
    span.style.setProperty("--unlikely", (1 - Math.exp(logp)).toFixed(3));
    const change = before === undefined ? 0 : Math.max(-1, Math.min(1, (logp - before) / FULL));
    span.style.setProperty("--up", Math.max(0, change).toFixed(3));
    span.style.setProperty("--down", Math.max(0, -change).toFixed(3));
  }
  choose(i) {
    if (i < 0) return;
    this.spans.forEach((span, j) => {
      span.tabIndex = i === j ? 0 : -1;
      span.classList.toggle("chosen", i === j);
    });
    this.about?.(this.tokens[i], i);
  }
  text() {
    return tokens.decode(this.tokens.map((t) => t.id).filter((id) => id !== tokens.stop));
  }
}

// ----------------------------------------------------------------------- slide through the run

let at = 0, answered = 0;             // the stop that is shown; which answer is the newest
const stops = LIVE.stops;
const reply = new Reply(one("#reply"), aboutToken);
const temperature = () => Number(one("#temperature").value);

function aboutToken(token, i) {
  const name = (id) => id === tokens.stop ? "end of turn" : named(id);
  const p = Math.exp(token.logp), digits = p > 0.995 || p < 0.005 ? 2 : 1;
  const said = [make("b", { text: `Token ${i + 1}: ${name(token.id)}` }),
    ` has probability ${percent(p, digits)}, log-prob ${token.logp.toFixed(3)}.`];
  if (token.before !== undefined) {
    const change = token.logp - token.before, moment = momentOf(stops[token.against]);
    const then = percent(Math.exp(token.before), 1);
    said.push(` At ${moment} it had ${then}: ratio ${Math.exp(change).toFixed(2)}.`);
  }
  said.push(make("br"), "It could have said: ");
  token.others.forEach(({ id, logp }, n) =>
    said.push(n ? ", " : "", make("code", { text: name(id) }), ` ${percent(Math.exp(logp), 1)}`));
  one("#token").replaceChildren(...said);
}

function verdict(box, text) {
  const found = model.score(task.text, task.letters, text);
  const row = task.letters.map((c, i) => make("span", { class: found.right[i] ? "right" : "wrong",
    text: `${c} ${found.said[i] ?? "–"}${found.right[i] ? " ✓" : ` ✗ ${found.truth[i]}`}` }));
  const counts = make("span", { class: "counts" }, ...row.flatMap((span) => [span, " "]));
  box.replaceChildren(make("b", { text: found.reward ? "Exactly right." : "Not right." }),
    ` It ${HABITS[found.habit]}. `, counts);
  return found;
}

async function answer() {
  if (!task) return;
  const mine = ++answered, stop = stops[at], before = at - 1;
  reply.clear();
  one("#token").textContent = "";
  one("#verdict").textContent = "It speaks …";
  one("#moment").textContent = longMoment(stop);
  await ready(stop.name);
  if (mine !== answered) return;
  const done = await ask("sample", {
    part: "slide", name: stop.name, question: asText(), k: 1, temperature: temperature(),
    maxTokens: LIVE.max_tokens, seed: [Number(one("#seed").value), 1],
  }, (token) => { if (mine === answered) reply.push(token); });
  if (mine !== answered || !done) return;
  verdict(one("#verdict"), reply.text());
  const { ids, finished } = done.replies[0], speed = ids.length / done.seconds;
  one("#speed").textContent = `${ids.length} tokens in ${done.seconds.toFixed(2)} s, ` +
    `${speed.toFixed(0)} per second` + (finished ? "." : ": it was cut off.");
  if (before >= 0) {                  // the same tokens, as the snapshot before finds them
    await ready(stops[before].name);
    const [logps] = await ask("logprobs", { name: stops[before].name, prompt: done.prompt,
      replies: [ids], temperature: temperature() || 1 });
    if (mine !== answered) return;
    logps.forEach((logp, i) => {
      Object.assign(reply.tokens[i], { before: logp, against: before });
      reply.colour(i);
    });
    const total = sum(reply.tokens.map((token) => token.logp)), then = sum(logps);
    one("#whole").textContent = `The whole reply has log-prob ${total.toFixed(1)}; ` +
      `at ${momentOf(stops[before])} the same words had ${then.toFixed(1)}.`;
  } else {
    one("#whole").textContent = "This is where it begins: there is no snapshot before this one.";
  }
  if (!one("#reply .chosen")) {       // the token at which it was least certain
    const probabilities = reply.tokens.map((t) => t.logp);
    reply.choose(probabilities.indexOf(Math.min(...probabilities)));
  }
  one("#reply").dataset.done = stop.name;
}

function goTo(i) {
  at = Math.max(0, Math.min(stops.length - 1, i));
  const stop = stops[at], slider = one("#slider");
  slider.value = at;
  slider.setAttribute("aria-valuetext", longMoment(stop));
  delete one("#reply").dataset.done;
  const [low, high] = [stop.low, stop.high].map((p) => (100 * p).toFixed(1));
  one("#exact").textContent = `${percent(stop.exact, 1)} [${low}, ${high}]`;
  for (const habit in HABITS) one(`#${habit}`).textContent = percent(stop[habit], 0);
  curve();
  return answer().catch(fail);
}

async function playAll() {
  const button = one("#play");
  if (button.ariaPressed === "true") return void (button.ariaPressed = "false");
  button.ariaPressed = "true";
  for (let i = at === stops.length - 1 ? 0 : at; i < stops.length; i++) {
    if (button.ariaPressed === "false") return;
    await goTo(i);
    await new Promise((go) => setTimeout(go, 700));
  }
  button.ariaPressed = "false";
}

// The curve: a place on the x axis for each stop, right above the slider's. The areas are the
// habits, the line is the accuracy with its intervals, the dots are the batches trained on.
function curve() {
  const svg = one("#curve"), width = svg.clientWidth || 600, height = 190;
  const inset = 11, bottom = 20, top = 8;                 // inset: half of the slider's thumb
  const x = (i) => inset + (width - 2 * inset) * (stops.length > 1 ? i / (stops.length - 1) : 0.5);
  const y = (p) => top + (height - top - bottom) * (1 - p);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren();
  let floor = stops.map(() => 0);
  for (const habit of Object.keys(HABITS)) {
    const ceiling = stops.map((stop, i) => floor[i] + stop[habit]);
    const edge = (values) => values.map((p, i) => `${x(i)},${y(p)}`);
    const points = [...edge(ceiling), ...edge(floor).reverse()].join(" ");
    svg.append(draw("polygon", { class: habit, points }));
    floor = ceiling;
  }
  const placeOf = (update) => {       // between two stops, in proportion
    const i = stops.findLastIndex((stop) => stop.update <= update), next = stops[i + 1];
    return i < 0 || !next ? null : i + (update - stops[i].update) / (next.update - stops[i].update);
  };
  for (const [update, exact] of LIVE.batches) {
    const place = placeOf(update);
    if (place === null) continue;
    svg.append(draw("circle", { class: "batch", cx: x(place), cy: y(exact), r: 1.6 }));
  }
  for (const p of [0.5, 1]) {
    const ends = { x1: x(0), x2: x(stops.length - 1), y1: y(p), y2: y(p) };
    svg.append(draw("line", { class: "grid", ...ends }));
    svg.append(draw("text", { class: "axis", x: x(0) + 3, y: y(p) + 12 }, percent(p)));
  }
  svg.append(draw("line", { class: "here", x1: x(at), x2: x(at), y1: top, y2: height - bottom }));
  const points = stops.map((stop, i) => `${x(i)},${y(stop.exact)}`).join(" ");
  svg.append(draw("polyline", { class: "exact", points }));
  stops.forEach((stop, i) => {
    const reach = { x1: x(i), x2: x(i), y1: y(stop.low), y2: y(stop.high) };
    const point = { cx: x(i), cy: y(stop.exact), r: i === at ? 5 : 3 };
    svg.append(draw("line", { class: "reach", ...reach }));
    svg.append(draw("circle", { class: "exact", ...point }));
    const label = stop.update < 0 ? "base" : stop.update === 0 ? "SFT" : stop.update;
    const edge = i === 0 ? "start" : i === stops.length - 1 ? "end" : "middle";
    const aside = i === 1 && x(1) - x(0) < 34 ? 6 : 0;    // on a phone, out of the way of "base"
    const left = edge === "start" ? 0 : edge === "end" ? width : x(i) + aside;
    svg.append(draw("text", { x: left, y: height - 5, "text-anchor": edge,
      class: i === at ? "tick now" : "tick" }, label));
  });
}

// ----------------------------------------------------------------------- you are the reward

const K = 8, WARMUP = 5;              // samples of a group; steps over which the rate rises
const ELSEWHERE = [32, 48];           // tasks that are asked to see whether a habit holds elsewhere
let group = null;                     // the eight on the page: {cards, asked, prompt, replies}
let history = [];                     // of each draw: {shares, right, step: was one made on it?}
let startedFrom = null, draws = 0, busy = false;
let undoable = 0;                     // steps that the worker can still take back
const stepsMade = () => history.filter((h) => h.step).length;
const mean = (values) => sum(values) / values.length;

// Rewards and advantages onto the cards; what may be pressed. Returns the advantages.
function judge() {
  const complete = Boolean(group?.replies);
  const rewards = complete ? group.cards.map((card) => Number(card.good)) : [];
  const advantages = complete ? model.groupAdvantages(rewards) : [];
  group?.cards.forEach((card, i) => {
    card.button.ariaPressed = String(card.good);
    card.button.textContent = `reward ${Number(card.good)}`;
    card.box.classList.toggle("good", complete && advantages[i] > 0);
    card.box.classList.toggle("bad", complete && advantages[i] < 0);
    card.advantage.textContent = complete ? `advantage ${signed(advantages[i], 2)}` : "";
  });
  const signal = advantages.some((a) => a !== 0);
  one("#step").disabled = busy || !signal;
  one("#undo").disabled = busy || !undoable;
  for (const id of ["#five", "#draw", "#reset", "#elsewhere", "#from"]) one(id).disabled = busy;
  one("#signal").textContent = !complete ? "" : signal
    ? `Mean reward ${mean(rewards).toFixed(2)}: what lies above it becomes likelier, ` +
      "what lies below less likely."
    : "All eight earn the same, so every advantage is 0 and there is nothing to learn: " +
      "draw again, or judge otherwise.";
  return advantages;
}

const signed = (v, digits) => {       // +0.50, -0.50, and 0.00 without a sign
  const text = v.toFixed(digits);
  return Number(text) === 0 ? text.replace("-", "") : v > 0 ? `+${text}` : text;
};

function newCards() {
  const cards = Array.from({ length: K }, (_, i) => {
    const text = make("div", { class: "said", tabindex: 0, role: "group",
      "aria-label": `sample ${i + 1}` });
    const habit = make("span", { class: "habit" });
    const advantage = make("span", { class: "advantage" });
    const good = { type: "button", class: "thumb", "aria-label": `sample ${i + 1} is good` };
    const button = make("button", good);
    const top = make("div", { class: "row" }, make("b", { text: `${i + 1}` }), habit);
    const bottom = make("div", { class: "row" }, button, advantage);
    const box = make("li", { class: "card" }, top, text, bottom);
    const card = { box, text, habit, button, advantage, good: false };
    button.addEventListener("click", () => {
      if (busy) return;
      card.good = !card.good;
      one("#auto").checked = false;   // from here on, a person decides
      judge();
    });
    return card;
  });
  one("#cards").replaceChildren(...cards.map((card) => card.box));
  return cards;
}

const said = (reply) => tokens.decode(reply.ids.filter((id) => id !== tokens.stop));

async function drawEight() {
  const asked = { ...task, question: asText() };
  group = { cards: newCards(), asked };
  judge();
  const done = await ask("sample", {
    part: "own", name: "own", question: asked.question, k: K, temperature: 1,
    maxTokens: LIVE.max_tokens, seed: [Number(one("#seed2").value), 2, draws++],
  }, ({ i, id }) => { if (id !== tokens.stop) group.cards[i].text.append(visible(id)); });
  Object.assign(group, { prompt: done.prompt, replies: done.replies });
  const shares = { derives: 0, states: 0, bare: 0 };
  group.cards.forEach((card, i) => {
    card.score = model.score(asked.text, asked.letters, said(done.replies[i]));
    const { reward, habit } = card.score;
    card.habit.textContent = `${HABITS[habit]}, ${reward ? "right" : "wrong"}`;
    card.habit.className = `habit ${habit}`;
    card.good = one("#auto").checked && reward === 1;
    shares[habit] += 1 / K;
  });
  history.push({ shares, right: mean(group.cards.map((card) => card.score.reward)), step: false });
  judge();
  ownCurve();
  const sampled = sum(done.replies.map((reply) => reply.ids.length));
  one("#speed2").textContent = `${sampled} tokens in ${done.seconds.toFixed(1)} s, ` +
    `${(sampled / done.seconds).toFixed(0)} per second.`;
}

// One step of GRPO on the eight; false if their advantages are all 0.
async function makeStep() {
  const advantages = judge();
  if (!advantages.some((a) => a !== 0)) return false;
  one("#signal").textContent = "One step: forward, backward, Adam …";
  const n = stepsMade(), lr = Number(one("#lr").value) * Math.min(1, (n + 1) / WARMUP);
  const { prompt, replies } = group;
  const done = await ask("step", { prompt, replies, advantages, temperature: 1, lr });
  const moved = (sign) => {           // how far the log-prob of the good, or of the bad, has moved
    const some = [...advantages.keys()].filter((i) => sign * advantages[i] > 0);
    return mean(some.map((i) => sum(done.now[i]) - sum(replies[i].logps)));
  };
  history.at(-1).step = true;
  undoable = done.undoable;
  const reward = mean(group.cards.map((card) => Number(card.good)));
  const cells = [n + 1, reward.toFixed(2), signed(done.loss, 4), done.ratio.toFixed(3),
    done.norm.toFixed(2), lr.toFixed(4), signed(moved(1), 2), signed(moved(-1), 2), done.tokens,
    done.seconds.toFixed(1)];
  one("#steps tbody").append(make("tr", {}, ...cells.map((text) => make("td", { text }))));
  tellSteps();
  return true;
}

function tellSteps() {
  const n = stepsMade();
  one("#steps").hidden = n === 0;
  const steps = `${n || "No"} ${n < 2 ? "step" : "steps"}`;
  one("#since").textContent = `${steps} from ${momentOf(startedFrom)}`;
}

const judgeExactly = () => group.cards.forEach((card) => { card.good = card.score.reward === 1; });

async function fiveSteps() {          // a draw without a signal costs no step, but there is an end
  one("#auto").checked = true;
  for (let made = 0, draws = 0; made < 5 && draws < 20; draws++) {
    if (group) judgeExactly();
    made += group && await makeStep() ? 1 : 0;
    await drawEight();
  }
}

async function startFrom(stop) {
  await ready(stop.name);
  await ask("start", { name: stop.name, seed: Number(one("#seed2").value) });
  startedFrom = stop;
  history = [];
  draws = 0;
  undoable = 0;
  group = null;
  for (const id of ["#cards", "#steps tbody"]) one(id).replaceChildren();
  for (const id of ["#speed2", "#others"]) one(id).textContent = "";
  tellSteps();
  ownCurve();
}

async function undoStep() {
  ({ undoable } = await ask("undo"));
  while (!history.at(-1).step) history.pop();   // what was drawn after that step
  history.pop();                                // and the draw that it was made on
  one("#steps tbody").lastElementChild.remove();
  tellSteps();
  await drawEight();
}

// Does it hold elsewhere? Other development questions, greedy.
async function askElsewhere() {
  const some = LIVE.tasks.slice(...ELSEWHERE), found = { right: 0, derives: 0 }, n = stepsMade();
  for (const [i, [text, letters]] of some.entries()) {
    const { replies } = await ask("sample", {
      part: "elsewhere", name: "own", question: model.question(text, [...letters]), k: 1,
      temperature: 0, maxTokens: LIVE.max_tokens, seed: [0],
    });
    const { reward, habit } = model.score(text, [...letters], said(replies[0]));
    found.right += reward;
    found.derives += habit === "derives";
    one("#others").textContent = `After ${n} ${n === 1 ? "step" : "steps"}, ${i + 1} other ` +
      `development questions, greedy: ${found.right} exactly right, ${found.derives} spelled out.`;
  }
}

// The same picture for the steps made here: a column for each draw of eight.
function ownCurve() {
  const svg = one("#own"), width = svg.clientWidth || 600, height = 120, bottom = 18, top = 6;
  const n = history.length;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren();
  const room = Math.min(46, width / Math.max(n, 1));
  const y = (p) => top + (height - top - bottom) * (1 - p);
  if (!n) svg.append(draw("text", { x: 0, y: y(0.5) }, "Draw eight to begin."));
  let made = 0;
  history.forEach((h, i) => {
    let floor = 0;
    for (const habit of Object.keys(HABITS)) {
      const ceiling = floor + h.shares[habit];
      svg.append(draw("rect", { class: habit, x: i * room + 1, width: Math.max(room - 2, 1),
        y: y(ceiling), height: y(floor) - y(ceiling) }));
      floor = ceiling;
    }
    svg.append(draw("circle", { class: "exact", cx: (i + 0.5) * room, cy: y(h.right), r: 3.5 }));
    const below = { x: (i + 0.5) * room, y: height - 4, "text-anchor": "middle" };
    if (room > 18 || i % 5 === 0) svg.append(draw("text", { class: "tick", ...below }, made));
    made += Number(h.step);
  });
}

// ------------------------------------------------------------------------------------ begin

// One thing at a time: while it is done, the buttons of that part are off.
const doing = (work) => async () => {
  if (busy) return;
  busy = true;
  judge();
  try { await work(); } catch (error) { fail(error); } finally { busy = false; judge(); }
};

function listen() {
  let number = FIRST, later;
  const soon = (work) => { clearTimeout(later); later = setTimeout(work, 250); };
  one("#slider").max = stops.length - 1;
  one("#slider").addEventListener("input", (e) => {
    one("#play").ariaPressed = "false";
    goTo(Number(e.target.value));
  });
  one("#play").addEventListener("click", () => playAll().catch(fail));
  one("#another").addEventListener("click", () => { showTask(++number); goTo(at); });
  for (const id of ["#text", "#letters"]) one(id).addEventListener("input", () => {
    one("#which").textContent = "A question of yours.";
    soon(() => { if (readTask()) goTo(at); });
  });
  for (const id of ["#temperature", "#seed"]) one(id).addEventListener("input", () => {
    one("#warm").textContent = temperature() === 0 ? "0: greedy" : temperature().toFixed(1);
    soon(() => goTo(at));
  });
  for (const radio of document.querySelectorAll("[name=colour]")) {
    radio.addEventListener("change", () => {
      one("#reply").className = radio.value;
      one("#legend").className = `legend ${radio.value}`;
    });
  }
  one("#curve").addEventListener("click", (e) => {
    const { left, width } = one("#curve").getBoundingClientRect();
    goTo(Math.round((e.clientX - left - 11) / (width - 22) * (stops.length - 1)));
  });
  one("#draw").addEventListener("click", doing(drawEight));
  one("#step").addEventListener("click", doing(async () => {
    if (await makeStep()) await drawEight();
  }));
  one("#five").addEventListener("click", doing(fiveSteps));
  one("#elsewhere").addEventListener("click", doing(askElsewhere));
  one("#undo").addEventListener("click", doing(undoStep));
  const again = doing(() => startFrom(stops[Number(one("#from").value)]));
  one("#reset").addEventListener("click", again);
  one("#from").addEventListener("change", again);
  one("#auto").addEventListener("change", () => {
    if (one("#auto").checked && group?.replies) judgeExactly();
    judge();
  });
  const option = (stop, value) => make("option", { value, text: momentOf(stop) });
  one("#from").append(...stops.map(option));
  addEventListener("resize", () => { curve(); ownCurve(); });
}

function tellFacts() {
  const last = stops.at(-1), facts = one("#facts");
  const say = (text) => facts.append(make("li", { text }));
  say(`The run: ${LIVE.run}, letters, tier ${LIVE.tier}, seed ${LIVE.seed}, ` +
    `${LIVE.updates} updates of ${LIVE.num_tasks} tasks × ${LIVE.k} samples at learning rate ` +
    `${LIVE.lr}.`);
  say(`Snapshots: ${stops.map(momentOf).join(", ")}.`);
  say(`Measured with torch ${LIVE.torch}, transformers ${LIVE.transformers}, ` +
    `Python ${LIVE.python}` + (LIVE.commit ? `; code: ${LIVE.commit.slice(0, 10)}.` : "."));
  const where = inWorker ? "in a worker, beside the page" : "in the page itself, in slices";
  say(`This page computes ${where}.`);
  one("#moments").textContent = stops.length;
  one("#of").textContent = `n = ${last.n} development tasks`;
  one("#samples").textContent = `${last.sampled_n} samples`;
}

async function begin() {
  startEngine();
  listen();
  showTask(FIRST);
  curve();
  await script("base");
  await ask("load", { base64: LIVE.base, entries: LIVE.entries, tokenizer: LIVE.tokenizer });
  tellFacts();
  await startFrom(stops[0]);
  judge();
  document.documentElement.dataset.ready = "yes";
  await goTo(0);
}

begin().catch(fail);
