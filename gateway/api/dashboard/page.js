
"use strict";
// Reads /status every two seconds and shows it. Everything that comes from there is put in as text, never as markup.
const EVERY_MS = 2000;
const MOST_CELLS = 64;
const KEY = "slotgate-key"; // in sessionStorage: this tab only
const SVG = "http://www.w3.org/2000/svg";
const find = (id) => document.getElementById(id);
let timer = 0;

function make(tag, attributes, ...inside) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
  node.append(...inside.map((one) => (one === null || one === undefined ? "–" : one)));
  return node;
}

const seconds = (s) => (s === null || s === undefined ? "–" : s < 1 ? `${Math.round(s * 1000)} ms` : `${s.toFixed(s < 10 ? 2 : 1)} s`);
const percent = (share) => (share === null || share === undefined ? "–" : `${Math.round(share * 100)} %`);
const count = (n) => (n || 0).toLocaleString("en");
const rate = (n) => (n < 10 ? n.toFixed(1) : Math.round(n).toString());

// lines: [{values, cls}], all over the same ages; null is a gap. `told` writes the greatest value.
function chart(name, ages, lines, told) {
  const svg = find(`chart-${name}`);
  const most = Math.max(1e-9, ...lines.flatMap((line) => line.values.filter((v) => v !== null)));
  const x = (age) => (300 - Math.min(300, age)).toFixed(1);
  const y = (value) => (54 - (value / most) * 50).toFixed(1);
  svg.setAttribute("viewBox", "0 0 300 56");
  svg.setAttribute("preserveAspectRatio", "none");
  const ground = document.createElementNS(SVG, "line");
  for (const [name, value] of Object.entries({ x1: 0, x2: 300, y1: 54, y2: 54 })) ground.setAttribute(name, value);
  const paths = lines.map((line) => {
    let pen = "M";
    let d = "";
    line.values.forEach((value, i) => {
      if (value === null) pen = "M";
      else { d += `${pen}${x(ages[i])} ${y(value)}`; pen = "L"; }
    });
    const path = document.createElementNS(SVG, "path");
    if (line.cls) path.setAttribute("class", line.cls);
    path.setAttribute("d", d);
    return path;
  });
  svg.replaceChildren(ground, ...paths);
  find(`most-${name}`).textContent = ages.length && most > 1e-9 ? `up to ${told(most)}` : "";
}

function showCharts(history) {
  const ages = history.map((point) => point.age_s);
  const line = (name, cls) => ({ values: history.map((point) => point[name]), cls });
  chart("ttft", ages, [line("ttft_p95_s")], seconds);
  chart("itl", ages, [line("itl_p95_s")], seconds);
  chart("rate", ages, [line("served_per_s"), line("shed_per_s", "bad")], (n) => `${rate(n)}/s`);
  chart("queue", ages, [line("queue_limit", "limit"), line("queued")], String);
}

function showFindings(findings) {
  const items = findings.map((one) => make("li", { class: one.level }, one.text));
  find("findings").replaceChildren(...(items.length ? items : [make("li", { class: "fine" }, "All is well.")]));
}

function showTiles(status) {
  const p95 = status.p95.all || {};
  const of = (window, what) => seconds(p95[window] && p95[window][what]);
  const minute = status.last_minute;
  find("ttft").textContent = of("1m", "ttft");
  find("ttft5").textContent = `five minutes: ${of("5m", "ttft")}`;
  find("itl").textContent = of("1m", "itl");
  find("itl5").textContent = `five minutes: ${of("5m", "itl")}`;
  find("served").textContent = `${rate(minute.served_per_s)}/s`;
  find("shed").textContent = `refused ${rate(minute.shed_per_s)}/s, ${rate(minute.generated_tokens_per_s)} tokens/s`;
  const last = status.history[status.history.length - 1];
  find("queue").textContent = last ? `${status.queued} of ${last.queue_limit}` : String(status.queued);
  find("queue-sub").textContent = `full ${percent(minute.queue_full_share)} of the last minute`;
}

function cells(backend) {
  const kinds = [["ours", backend.in_flight], ["settling", backend.settling]];
  const used = backend.in_flight + backend.settling;
  const others = Math.max(0, Math.min(Math.round(backend.others), backend.slots - used));
  kinds.push(["others", others], ["", Math.max(0, backend.slots - used - others)]);
  const box = make("div", { class: "cells", role: "img", "aria-label": `${backend.in_flight} of ${backend.slots} slots are ours` });
  for (const [kind, n] of kinds) {
    for (let i = 0; i < n && box.childElementCount < MOST_CELLS; i++) box.append(make("i", { class: `cell ${kind}` }));
  }
  return box;
}

function backendRow(one) {
  const assumed = one.slots_source === "assumed" ? " (assumed)" : "";
  const age = one.report_age_s;
  const report = make("td", age === null || age > 15 ? { class: "late" } : {}, age === null ? "never" : `${Math.round(age)} s ago`);
  return make("tr", { "data-name": one.name },
    make("td", {}, one.name, make("small", {}, one.engine || "unknown engine")),
    make("td", {}, make("span", { class: `state ${one.state}` }, one.state)),
    make("td", {}, cells(one), make("small", {}, `${one.in_flight}/${one.slots}${assumed}`)),
    make("td", {}, percent(one.cached_share)),
    make("td", {}, percent(one.kv_used_ratio)),
    make("td", {}, `${count(Math.round(one.prefill_tokens_per_s))} tok/s`),
    report);
}

function rows(id, all) {
  find(id).tBodies[0].replaceChildren(...all);
}

function showTables(status) {
  rows("backends", status.backends.map(backendRow));
  rows("models", Object.entries(status.models).map(([name, model]) => {
    const p95 = (status.p95[name] || {})["1m"] || {};
    return make("tr", {}, make("td", {}, name), make("td", {}, `${model.queued}/${model.queue_limit}`),
      make("td", {}, seconds(p95.ttft)), make("td", {}, seconds(p95.itl)));
  }));
  rows("keys", Object.entries(status.keys).slice(0, 50).map(([name, key]) => make("tr", {},
    make("td", {}, name), ...["requests", "served", "prompt_tokens", "cached_tokens", "generated_tokens"].map((what) => make("td", {}, count(key[what]))))));
}

function show(status) {
  find("version").textContent = status.version;
  say(status.ready ? "ready" : status.draining ? "draining" : "not ready", status.ready ? "ok" : "bad");
  showFindings(status.findings);
  showTiles(status);
  showCharts(status.history);
  showTables(status);
  find("ask").hidden = true;
  find("main").hidden = false;
}

function say(text, cls) {
  find("state").textContent = text;
  find("state").className = cls;
}

function askForKey(why) {
  sessionStorage.removeItem(KEY);
  find("forget").hidden = true;
  find("main").hidden = true;
  find("ask").hidden = false;
  if (why) find("ask-why").textContent = why;
  say("needs a key", "");
  find("key").focus();
}

async function look() {
  const key = sessionStorage.getItem(KEY);
  if (!key && document.documentElement.dataset.needsKey === "true") return askForKey("");
  try {
    const answer = await fetch("status", { headers: key ? { Authorization: `Bearer ${key}` } : {}, cache: "no-store" });
    if (answer.status === 401) return askForKey(key ? "That key is not known here. Give an admin key." : "");
    if (answer.status === 403) return askForKey("That key is not an admin key: slotgate keys new NAME --admin makes one.");
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    show(await answer.json());
    find("forget").hidden = !key;
  } catch (error) {
    say(`no answer from the gateway (${error.message})`, "bad");
  }
  timer = setTimeout(look, EVERY_MS);
}

find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, find("key").value.trim());
  find("key").value = "";
  clearTimeout(timer);
  look();
});
find("forget").addEventListener("click", () => {
  clearTimeout(timer);
  askForKey("");
});
look();
