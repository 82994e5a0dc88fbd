// The picture of README: one group is scored and trained on, and its tokens change their colours.
//
// All of it is computed here, by model.js, from two snapshots of the run that the live page shows:
// eight replies after update 8; their rewards and advantages; one step of GRPO on these eight, at
// the run's learning rate; how much likelier each token has become by it; and eight replies after
// update 150. The word, the moments and the seed were chosen, so that both habits are in the group;
// what the model says and what the step changes were not.
//
// What comes out is an image without a script or a font of its own. It moves by CSS, follows the
// reader's light or dark colours, and stands still, complete, for who asks for less motion.

"use strict";

const WORD = "strawberry", LETTERS = ["r"], K = 8, SEED = 7;
// Tags as words, for who has never seen a chat template.
const SHOWN = { "<think>": "think:", "</think>": "", "<answer>": "answer: ", "</answer>": "",
  "<|im_end|>": "", "\n": " ", ".\n": ". " };
const WIDE = 8.7, HIGH = 22;          // of a character, and of a row

async function picture() {
  const model = pico(), tokens = model.tokenizer(LIVE.tokenizer);
  const base = model.unpackBase(LIVE.base, LIVE.entries);
  const prompt = tokens.prompt(model.question(WORD, LETTERS));
  const sample = async (adapter) => {
    const uniform = Array.from({ length: K }, (_, i) => model.randomOf(SEED, i));
    const how = { temperature: 1, maxTokens: 64, stop: tokens.stop, uniform };
    const replies = await model.sample(model.fold(base, adapter), prompt, K, how);
    return replies.map((reply) => {
      const text = tokens.decode(reply.ids.filter((id) => id !== tokens.stop));
      const pieces = reply.ids.map((id) => tokens.decode([id])).map((p) => SHOWN[p] ?? p);
      return { ...reply, pieces, right: model.score(WORD, LETTERS, text).reward === 1 };
    });
  };
  const adapter = model.unpackAdapter(LIVE.adapters["0008"]);
  const before = await sample(adapter);
  const advantages = model.groupAdvantages(before.map((reply) => Number(reply.right)));
  const { gradient } = model.grpoGradient(base, adapter, prompt, before, advantages);
  model.adamStep(adapter, gradient, model.newAdam(), LIVE.lr);
  const said = before.map((reply) => reply.ids);
  const now = model.logprobsOf(model.fold(base, adapter), prompt, said);
  before.forEach((reply, i) => {
    reply.advantage = advantages[i];
    reply.changes = now[i].map((logp, t) => (logp - reply.logps[t]) / Math.LN2);
  });
  const after = await sample(model.unpackAdapter(LIVE.adapters["0150"]));
  const rows = [
    ...before.map((reply, i) => row(reply, 92 + HIGH * i, 1 + Math.floor(i / 2), 7)),
    ...after.map((reply, i) => row(reply, 354 + HIGH * i, 24 + Math.floor(i / 2), 29)),
  ];
  return frame(rows, before, after);
}

// A reply: its words appear in one frame, its mark in another, then what training makes of it.
function row({ pieces, right, advantage, changes = [] }, y, said, scored) {
  let at = 16, words = "", colours = "";
  pieces.forEach((piece, t) => {
    const word = piece.trim(), width = (WIDE * word.length).toFixed(1);
    const place = `x="${(at + WIDE * piece.indexOf(word)).toFixed(1)}" y="${y}"`;
    at += WIDE * piece.length;
    if (!word) return;
    words += `<text ${place} textLength="${width}">${word.replace(/[&<]/g, "")}</text>`;
    const share = Math.min(1, Math.abs(changes[t] ?? 0)).toFixed(2);  // 1: a factor of 2
    const way = changes[t] > 0 ? "up" : "down";
    if (share >= 0.05)
      colours += `<rect class="${way}" opacity="${share}" ${place} width="${width}"></rect>`;
  });
  const [mark, kind] = right ? ["✓", "right"] : ["✗", "wrong"];
  const parts = [
    [scored + 10, colours], [said, words],
    [scored, `<text class="mark ${kind}" x="458" y="${y}">${mark}</text>`],
    [scored + 5, advantage === undefined ? "" : `<text class="number ${kind}" x="508" y="${y}">` +
      `${advantage > 0 ? "+" : "−"}${Math.abs(advantage).toFixed(1)}</text>`],
  ];
  return parts.filter(([, part]) => part)
    .map(([when, part]) => `<g class="f${when}">${part}</g>`).join("\n");
}

// The whole file. Class f7 appears in frame 7; 40 frames are a round of 14 seconds.
function frame(rows, before, after) {
  const rights = (replies) => replies.filter((reply) => reply.right).length;
  const frames = [...new Set([...rows.join().matchAll(/class="f(\d+)"/g)].map(([, n]) => +n))];
  const appear = [...new Set([...frames, 1, 7, 17, 22, 29, 32])].sort((a, b) => a - b).map((n) =>
    `@keyframes f${n} { 0%, ${2.5 * n}% { opacity: 0 } ${2.5 * n + 2}%, 98% { opacity: 1 } }\n` +
    `.f${n} { animation-name: f${n} }`);
  return `<svg xmlns="http://www.w3.org/2000/svg" width="524" height="560" viewBox="0 0 524 560">
<title>Eight replies are scored and trained on</title>
<style>
:root { --paper: #fff; --line: #d0d7de; --ink: #1c1f23;
  --up: #5fd0a2; --down: #ff9f7d; --right: #00694e; --wrong: #a3320b }
@media (prefers-color-scheme: dark) { :root { --paper: #161b22; --line: #3d444d;
  --ink: #e6edf3; --up: #0f7a56; --down: #a8431d; --right: #4ed0a7; --wrong: #ff9d75 } }
.card { fill: var(--paper); stroke: var(--line) }
text { fill: var(--ink); font: 14.5px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace }
.say { font: 15px system-ui, "Segoe UI", "Helvetica Neue", "DejaVu Sans", sans-serif }
.ask { font-size: 19px; font-weight: 700 }
.number { text-anchor: end } .mark { font-size: 17px; text-anchor: middle }
.up { fill: var(--up) } .down { fill: var(--down) }
.right { fill: var(--right) } .wrong { fill: var(--wrong) }
g rect { height: 19px; transform: translateY(-14px) }
g { animation-duration: 14s; animation-iteration-count: infinite }
${appear.join("\n")}
@media (prefers-reduced-motion: reduce) { g { animation: none !important } }
</style>
<rect class="card" x=".5" y=".5" width="523" height="559" rx="10"></rect>
<text class="say ask" x="16" y="34">How often is “${LETTERS}” in “${WORD}”?</text>
<g class="f1"><text class="say" x="16" y="64">A small language model answers eight times.</text></g>
<g class="f7"><text class="say number wrong" x="508" y="64">${rights(before)} of 8 right</text></g>
${rows.join("\n")}
<g class="f17"><rect class="up" x="160" y="284" width="66"></rect>
<rect class="down" x="394" y="284" width="84"></rect>
<text class="say" x="16" y="284" textLength="138">Better than average:</text>
<text class="say" x="166" y="284" textLength="54">likelier</text>
<text class="say" x="248" y="284" textLength="140">Worse than average:</text>
<text class="say" x="400" y="284" textLength="72">less likely</text></g>
<g class="f22"><text class="say" x="16" y="326">After 150 such updates, the same question:</text></g>
<g class="f29"><text class="say number right" x="508" y="326">${rights(after)} of 8 right</text></g>
<g class="f32"><text class="say" x="16" y="542">Nobody told it to spell the word. It was only scored.</text></g>
</svg>
`;
}
