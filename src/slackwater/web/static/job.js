"use strict";
/* The page of one job: its figures, its life, its speed, what was tuned, its ranks, events and log. */

sw.JOB_POLL_MS = 2000;
sw.LOG_POLL_MS = 1500;
sw.LOG_CHARS_MAX = 400000;

sw.pages.job = (id) => {
  const live = sw.data.meta.kind === "live";
  const head = sw.h("div", { class: "job-head" });
  const facts = sw.h("dl", { class: "facts" });
  const life = sw.h("div");
  const speed = sw.h("div");
  const tuning = sw.h("div");
  const ranks = sw.h("div");
  const events = sw.h("ol", { class: "events" });
  const problem = sw.h("p", { class: "alert bad", hidden: true });
  const actions = sw.h("div", { class: "actions" });
  const cards = {
    life: sw.h("div", { class: "card whole" }, sw.h("h2", {}, "When it waited and ran"), life),
    speed: sw.h("div", { class: "card" }, sw.h("h2", {}, "Speed against its speed alone"), speed),
    tuning: sw.h("div", { class: "card" }, sw.h("h2", {}, "Batch and efficiency"), tuning),
    ranks: sw.h("div", { class: "card" }, sw.h("h2", {}, "Ranks"), ranks),
    events: sw.h("div", { class: "card" }, sw.h("h2", {}, "Events"), events),
  };
  let page = null;
  let timer = null;
  let gone = false;
  let speedChart = null;
  let tuningCharts = null;
  const log = live ? sw.logView(id) : null;

  const fact = (term, text) => (text === null || text === "" || text === sw.NOTHING ? [] : [sw.h("dt", {}, term), sw.h("dd", {}, text)]);

  const showFacts = (job, going) => {
    const [iteration, perS, etaS, loss, moves] = going;
    const nowS = sw.data.nowS();
    const asked = [job.gpus ? sw.number(job.gpus, "GPU") : "", sw.number(job.workers, "worker"), sw.number(job.servers, "server")].filter(Boolean).join(", ");
    facts.replaceChildren(...[
      fact("Runs", job.program || (live ? "started by its user" : null)),
      fact("Model", job.model),
      fact("Tenant", job.tenant),
      fact("Asked for", asked),
      fact("Holds", job.nodes.map(([node, number]) => `${node} (${number})`).join(", ")),
      fact("Aggregators", job.aggregators.join(", ") + (moves ? `; moved ${sw.number(moves, "time")}` : "")),
      fact("Progress", sw.progress({ iteration, iterations: job.iterations }) + (perS ? `, ${sw.speed(perS)}` : "")),
      fact("Left", live && sw.known(etaS) ? sw.duration(etaS) : null),
      fact("Loss of speed", sw.known(loss) ? sw.percent(Math.max(0, loss), 1) : null),
      fact("Submitted", `${sw.clock(job.submitted_s)}${live ? `, ${sw.ago(job.submitted_s)}` : ""}`),
      fact("Waited", page?.life ? sw.duration(sw.spent(page.life, ["pending", "paused"], job.finished_s || nowS)) : !live && sw.known(etaS) ? sw.duration(etaS) : null),
      fact("Ran", page?.life ? sw.duration(sw.spent(page.life, ["running"], job.finished_s || nowS)) : null),
      fact("Preempted", job.preemptions ? sw.number(job.preemptions, "time") : null),
      fact("Restarts", job.restarts ? sw.count(job.restarts) : null),
      ...Object.entries(page?.measured ?? {}).map(([name, value]) => fact(name, sw.figure(value))),
      fact("Reason", job.reason),
      fact("Hangs", page?.hang ?? null),
    ].flat());
  };

  const showActions = (job) => {
    if (!sw.data.meta.acts) return;
    const ended = ["completed", "failed", "cancelled"].includes(job.state);
    const offered = ended ? ["rerun"] : [job.state === "paused" || job.held ? "resume" : "pause", "cancel"];
    if (actions.dataset.offered === offered.join()) return;
    actions.dataset.offered = offered.join();
    actions.replaceChildren(...offered.map((action) => sw.h("button", {
      type: "button", class: action === "cancel" ? "danger" : "", onclick: () => sw.act(id, action).then(load, (error) => say(error.message)),
    }, action)));
  };

  const say = (text) => {
    problem.textContent = text;
    problem.hidden = !text;
  };

  const showSpeed = (told) => {
    const points = told?.speeds ?? [];
    cards.speed.hidden = !points.length;
    if (!points.length) return;
    if (speedChart === null) {
      speedChart = sw.chart({
        height: 210, yText: (value) => (sw.known(value) ? value.toFixed(2) : sw.NOTHING), yMax: Math.max(1.15, ...points.map((each) => each[1])),
        series: [
          { label: "speed / speed alone", color: "c1", stepped: false, points: points.length < 60 },
          { label: "limit of loss", color: "c4", dash: [5, 4], stepped: false, width: 1 },
        ],
      });
      speed.replaceChildren(speedChart.element);
    }
    const xs = points.map((each) => each[0]);
    const endS = page?.job.finished_s || sw.data.nowS();
    const range = [told.stretches[0]?.[1] ?? xs[0], Math.max(endS, xs[xs.length - 1])];
    speedChart.show(xs, [points.map((each) => each[1]), xs.map(() => 1 - sw.lossLimit(page?.job))], range);
  };

  const showTuning = (points) => {
    cards.tuning.hidden = !points?.length;
    if (!points?.length) return;
    if (tuningCharts === null) {
      const one = (label, color, yText, yMax) => sw.chart({ height: 130, yText, yMax, series: [{ label, color }] });
      tuningCharts = [one("batch", "c1", sw.count), one("efficiency", "c2", (value) => sw.percent(value), 1.05), one("GPUs", "c3", sw.count)];
      tuning.replaceChildren(...tuningCharts.map((each) => each.element));
    }
    const xs = points.map((each) => each.at_s);
    const range = [xs[0], Math.max(xs[0] + 1, xs[xs.length - 1])];
    ["batch", "efficiency", "gpus"].forEach((name, index) => tuningCharts[index].show(xs, [points.map((each) => each[name])], range));
  };

  const showRanks = () => {
    const results = page?.results ?? {};
    const rows = page?.ranks ?? [];
    const all = [...new Set([...rows.map((each) => String(each[0])), ...Object.keys(results)])].sort(sw.natural);
    cards.ranks.hidden = !all.length;
    const by = new Map(rows.map((each) => [String(each[0]), each]));
    ranks.replaceChildren(sw.h("table", { class: "plain" },
      sw.h("thead", {}, sw.h("tr", {}, ["rank", "iteration", "speed", "last report", "result"].map((each) => sw.h("th", {}, each)))),
      sw.h("tbody", {}, all.map((rank) => {
        const [, iteration, perS, heardS] = by.get(rank) ?? [];
        return sw.h("tr", {}, [rank, sw.count(iteration), sw.speed(perS), sw.ago(heardS), results[rank] ?? ""].map((each) => sw.h("td", {}, each)));
      }))));
  };

  const draw = () => {
    const job = page?.job ?? sw.data.get("jobs", id);
    if (job === undefined) return;
    const going = sw.data.get("going", id) ?? page?.going ?? [];
    head.replaceChildren(...[sw.h("h1", {}, id), sw.state(job.state), job.held ? sw.state("held") : null, actions].filter(Boolean));
    showActions(job);
    showFacts(job, going);
    const told = page?.life;
    cards.life.hidden = !told?.stretches.length;
    if (told?.stretches.length) {
      const toS = job.finished_s || sw.data.nowS();
      life.replaceChildren(sw.timeline(told, told.stretches[0][1], Math.max(toS, told.stretches[0][1] + 1)));
    }
    showSpeed(told);
    showTuning(page?.tuning);
    showRanks();
    const happened = (page?.events ?? []).filter((each) => !each.routine);
    cards.events.hidden = !happened.length;
    events.replaceChildren(...[...happened].reverse().slice(0, 100).map((each, index) => sw.eventLine(index, each)));
  };

  const load = async () => {
    clearTimeout(timer);
    try {
      page = live ? await sw.ask(`/api/jobs/${encodeURIComponent(id)}`) : sw.report.details?.[id] ?? null;
      say("");
    } catch (error) {
      say(error.message);
    }
    if (gone) return;
    draw();
    if (live) timer = setTimeout(load, sw.JOB_POLL_MS);
  };

  const missing = !live && !sw.data.get("jobs", id);
  if (missing) say(`this report has no job ${id}`);
  load();
  return {
    element: sw.h("section", { class: "page job" }, sw.h("a", { class: "back", href: "#/jobs" }, "← jobs"), head, problem,
      sw.h("div", { class: "card whole" }, facts), cards.life,
      sw.h("div", { class: "grid" }, cards.speed, cards.tuning, cards.ranks, cards.events),
      log?.element ?? null),
    update: draw,
    leave: () => {
      gone = true;
      clearTimeout(timer);
      log?.leave();
    },
  };
};

/** Sum up the seconds of a life in these states, until `endS`. */
sw.spent = (life, states, endS) => life.stretches
  .filter(([state]) => states.includes(state))
  .reduce((sum, [, fromS, toS]) => sum + Math.max(0, (toS ?? endS) - fromS), 0);

/** Codes that move a terminal's cursor or colour its text. */
sw.CONTROLS = /\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z^_])|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]/g;

/** Show the log of a rank, and what it prints from then on. */
sw.logView = (id) => {
  const text = sw.h("pre", { class: "log", tabindex: "0", "aria-label": "log" });
  const note = sw.h("span", { class: "note" });
  const rank = sw.h("input", { type: "number", min: "0", value: "0", "aria-label": "rank", onchange: () => restart() });
  const follow = sw.h("input", { type: "checkbox", checked: true });
  let next = null;
  let timer = null;
  let left = false;
  let turn = 0;

  const restart = () => {
    next = null;
    text.textContent = "";
    turn += 1;
    read(turn);
  };

  const read = async (mine) => {
    clearTimeout(timer);
    const where = next === null ? "tail=500" : `offset=${next}`;
    let again = sw.LOG_POLL_MS;
    try {
      const piece = await sw.ask(`/api/jobs/${encodeURIComponent(id)}/log?rank=${rank.value}&${where}`);
      if (left || mine !== turn) return;
      next = piece.next;
      if (!text.textContent) text.dataset.empty = "nothing is printed yet";
      if (piece.text) {
        const whole = text.textContent + piece.text.replace(sw.CONTROLS, "");
        text.textContent = whole.slice(-sw.LOG_CHARS_MAX);
        if (follow.checked) text.scrollTop = text.scrollHeight;
        again = 0;
      }
      note.textContent = `on ${piece.node}` + (piece.ended ? `, ended with code ${piece.code}` : "");
    } catch (error) {
      if (left || mine !== turn) return;
      note.textContent = error.message;
      again = 2 * sw.LOG_POLL_MS;
    }
    if (!left) timer = setTimeout(() => read(mine), again);
  };

  restart();
  return {
    element: sw.h("div", { class: "card whole" }, sw.h("h2", {}, "Log"),
      sw.h("div", { class: "log-tools" }, sw.h("label", {}, "rank ", rank), sw.h("label", {}, follow, " follow"), note), text),
    leave: () => {
      left = true;
      clearTimeout(timer);
    },
  };
};
