"use strict";
/* The three pools at a glance, what needs a look, and what happened last. */

sw.RANGES = [["15 min", 900], ["1 h", 3600], ["6 h", 21600], ["24 h", 86400], ["all", null]];
sw.LOSS_LIMIT = 0.1;
/** The part of its speed that a job may lose: its own, else what clusters allow unless told otherwise. */
sw.lossLimit = (job) => job?.loss_limit || sw.LOSS_LIMIT;
sw.TOP_JOBS = 8;

/** Return the jobs' holdings as steps: [{id, steps, area}], of GPUs or of slots, the largest first. */
sw.holdings = (ofGpus, fromS, toS) => {
  const found = [];
  for (const [id, life] of sw.data.kind("lives")) {
    const gpus = life.gpus ?? sw.data.get("jobs", id)?.gpus ?? 0;
    if (gpus > 0 !== ofGpus) continue;
    const changes = [];
    for (const [, beginS, endS, held] of life.stretches) {
      if (!held) continue;
      changes.push([beginS, held]);
      if (endS !== null) changes.push([endS, -held]);
    }
    const steps = sw.levels(changes);
    const area = sw.area(steps, fromS, toS);
    if (area > 0) found.push({ id, steps, area });
  }
  return found.sort((a, b) => b.area - a.area);
};

/** Return the steps of the sum of several. */
sw.summed = (all) => sw.levels(all.flatMap((steps) => steps.map(([at, level], i) => [at, level - (i ? steps[i - 1][1] : 0)])));

/** Return steps of parameter servers that jobs would have of their own while aggregators serve them. */
sw.askedServers = () => {
  const changes = [];
  for (const [, life] of sw.data.kind("lives")) {
    for (const [fromS, toS] of life.served) {
      changes.push([fromS, life.servers]);
      if (toS !== null) changes.push([toS, -life.servers]);
    }
  }
  return sw.levels(changes);
};

/** Return what an operator should look at: [{level, text, href}]. */
sw.attention = () => {
  const found = [];
  const nowS = sw.data.nowS();
  const add = (level, text, href) => found.push({ level, text, href });
  for (const [what, { text, since_s }] of sw.data.kind("problems")) {
    add("bad", `${what} cannot be read, for ${sw.duration(nowS - since_s)}: ${text}`, "#/");
  }
  for (const [id, node] of sw.data.kind("nodes")) {
    if (!node.alive) add("bad", `node ${id} is not heard`, "#/nodes");
    for (const fault of node.faults) add("bad", `node ${id}: ${fault}`, "#/nodes");
  }
  for (const [id, each] of sw.data.kind("aggregators")) {
    if (!each.alive && each.cluster) add("bad", `aggregator ${id} serves jobs and is not heard`, "#/aggregators");
    if (each.drain === "late") add("warn", `aggregator ${id} is not empty in time`, "#/aggregators");
  }
  for (const [id, each] of sw.data.kind("devices")) {
    if (each.state !== "serving") add("bad", `device ${id} is ${each.state}: ${each.reason}`, "#/memory");
  }
  for (const [id, job] of sw.data.kind("jobs")) {
    const loss = sw.data.get("going", id)?.[3];
    if (job.state === "failed" && nowS - job.finished_s < 3600) add("bad", `job ${id} failed: ${job.reason}`, `#/jobs/${id}`);
    else if (job.state === "running" && sw.known(loss) && loss > sw.lossLimit(job)) {
      add("warn", `job ${id} runs ${sw.percent(loss, 1)} slower than alone`, `#/jobs/${id}`);
    }
  }
  return found;
};

sw.pages = sw.pages ?? {};

sw.pages.overview = () => {
  const live = sw.data.meta.kind === "live";
  let rangeS = Number(sessionStorage.getItem("range") ?? 3600) || null;
  const tile = (title, href) => {
    const figure = sw.h("b", { class: "figure" }, sw.NOTHING);
    const note = sw.h("span", { class: "note" });
    const bar = sw.h("i", {});
    const element = sw.h("a", { class: "tile", href }, sw.h("span", { class: "title" }, title), figure, sw.h("span", { class: "bar" }, bar), note);
    return {
      element,
      show: (text, part, said) => {
        figure.textContent = text;
        bar.style.width = `${100 * Math.min(1, Math.max(0, part || 0))}%`;
        note.textContent = said;
      },
    };
  };
  const gpus = tile("GPUs", "#/nodes");
  const servers = tile("Aggregators", "#/aggregators");
  const memory = tile("Memory of others", "#/memory");
  const jobs = tile("Jobs", "#/jobs");
  const charts = { gpus: null, servers: null, memory: null };
  const places = {
    gpus: sw.h("div"), servers: sw.h("div"), memory: sw.h("div"),
  };
  const titles = { gpus: sw.h("h2", {}, "GPUs by job"), servers: sw.h("h2", {}, "Aggregators"), memory: sw.h("h2", {}, "Memory lent, by machine") };
  const attention = sw.h("div", { class: "attention" });
  const events = sw.h("ol", { class: "events" });
  const keys = {};

  const ranges = sw.h("div", { class: "ranges", role: "group", "aria-label": "time shown" },
    sw.RANGES.map(([title, seconds]) => sw.h("button", {
      type: "button", "aria-pressed": String(seconds === rangeS),
      onclick: (event) => {
        rangeS = seconds;
        sessionStorage.setItem("range", seconds ?? 0);
        for (const each of ranges.children) each.setAttribute("aria-pressed", String(each === event.target));
        update();
      },
    }, title)));

  /** Make a chart anew only where its series changed. */
  const charted = (name, series, options) => {
    const key = JSON.stringify(series.map((each) => [each.label, each.color]));
    if (keys[name] !== key) {
      keys[name] = key;
      charts[name] = sw.chart({ series, height: 210, ...options });
      places[name].replaceChildren(charts[name].element);
    }
    return charts[name];
  };

  /** Return the times that are shown: as long as was chosen, but not from before there was anything. */
  const shownRange = () => {
    const nowS = sw.data.nowS();
    let firstS = live ? nowS - 60 : Infinity;
    for (const [, life] of sw.data.kind("lives")) if (life.stretches.length) firstS = Math.min(firstS, life.stretches[0][1]);
    if (firstS === Infinity) firstS = nowS - 1;
    return [live && rangeS !== null ? Math.max(firstS, nowS - rangeS) : firstS, nowS];
  };

  const showGpus = (fromS, toS) => {
    let all = 0;
    let used = 0;
    let slots = 0;
    let slotsUsed = 0;
    for (const [, node] of sw.data.kind("nodes")) {
      if (!node.alive) continue;
      all += node.gpus;
      used += node.gpus_used;
      slots += node.slots;
      slotsUsed += node.slots_used;
    }
    const policy = sw.data.get("pools", "gpus");
    const by = policy ? `given by ${policy.policy}, ${sw.number(policy.waiting, "job")} waiting` : "";
    const ofGpus = all > 0 || (sw.data.meta.kind !== "live" && sw.holdings(true, fromS, toS).length > 0);
    if (all) gpus.show(`${sw.count(used)} of ${sw.count(all)}`, used / all, by);
    else gpus.show("none", 0, slots ? `${sw.count(slotsUsed)} of ${sw.number(slots, "slot")} in use` : "no worker nodes");
    titles.gpus.textContent = ofGpus ? "GPUs by job" : "Slots by job";
    const holdings = sw.holdings(ofGpus, fromS, toS);
    const top = holdings.slice(0, sw.TOP_JOBS);
    const rest = holdings.slice(sw.TOP_JOBS);
    const series = top.map((each, index) => ({ label: each.id, color: sw.PALETTE[index] }));
    const steps = top.map((each) => each.steps);
    if (rest.length) {
      series.push({ label: `${sw.count(rest.length)} others`, color: "muted" });
      steps.push(sw.summed(rest.map((each) => each.steps)));
    }
    const capacity = ofGpus ? all : slots;
    if (capacity) {
      series.push({ label: "all", color: "text", dash: [4, 4], alone: true, width: 1 });
      steps.push([[fromS, capacity]]);
    }
    if (!series.length) series.push({ label: "none", color: "muted" });
    const { xs, rows } = sw.sampled(steps.length ? steps : [[]], fromS, toS);
    charted("gpus", series, { stacked: true, yText: sw.count }).show(xs, rows, [fromS, toS]);
  };

  const showServers = (fromS, toS) => {
    const infos = sw.data.rows("aggregators");
    const inUse = infos.filter((each) => each.cluster).length;
    const used = sw.data.get("levels", "aggregators") ?? [];
    const asked = sw.askedServers();
    const askedArea = sw.area(asked, fromS, toS);
    const usedArea = sw.area(used, fromS, toS);
    const saved = askedArea > 0 ? 1 - usedArea / askedArea : null;
    const askedNow = sw.levelAt(asked, toS);
    servers.show(
      infos.length ? `${sw.count(inUse)} of ${sw.count(infos.length)}` : sw.NOTHING,
      infos.length ? inUse / infos.length : 0,
      `${sw.number(askedNow, "server")} asked for` + (saved === null ? "" : saved >= 0
        ? `; ${sw.percent(saved)} of the server time saved`
        : `; ${sw.percent(-saved)} more used, to measure jobs alone`),
    );
    const series = [
      { label: "servers asked for", color: "c5", fill: true },
      { label: "aggregators in use", color: "c1", fill: true },
    ];
    const { xs, rows } = sw.sampled([asked, used], fromS, toS);
    charted("servers", series, { yText: sw.count }).show(xs, rows, [fromS, toS]);
  };

  const showMemory = (fromS, toS) => {
    const lenders = sw.data.rows("lenders");
    const lent = lenders.reduce((sum, each) => sum + each.lent_slabs * each.slab_bytes, 0);
    const free = lenders.reduce((sum, each) => sum + each.free_slabs * each.slab_bytes, 0);
    memory.show(
      lenders.length ? sw.bytes(lent) : "none",
      lent + free ? lent / (lent + free) : 0,
      lenders.length ? `lent by ${sw.number(lenders.length, "machine")}, ${sw.bytes(free)} more ready` : "no machine lends memory",
    );
    const series = [];
    const steps = [];
    [...sw.data.kind("lent").keys()].sort(sw.natural).slice(0, sw.TOP_JOBS).forEach((id, index) => {
      const bytes = sw.data.get("lenders", id)?.slab_bytes;
      if (!bytes) return;
      series.push({ label: id, color: sw.PALETTE[index] });
      steps.push(sw.data.get("lent", id).map(([at, slabs]) => [at, slabs * bytes]));
    });
    places.memory.parentElement.hidden = !series.length;
    if (!series.length) return;
    const { xs, rows } = sw.sampled(steps, fromS, toS);
    charted("memory", series, { stacked: true, yText: sw.bytes, ySize: 76 }).show(xs, rows, [fromS, toS]);
  };

  const showJobs = () => {
    const counts = sw.data.get("counts", "jobs") ?? {};
    const of = (...states) => states.reduce((sum, state) => sum + (counts[state] ?? 0), 0);
    const running = of("running", "starting", "stopping");
    const waiting = of("pending", "paused");
    jobs.show(sw.count(running), running / Math.max(1, running + waiting),
      `running; ${sw.count(waiting)} waiting, ${sw.count(of("completed"))} completed, ${sw.count(of("failed"))} failed`);
  };

  const showAttention = () => {
    const found = sw.attention();
    attention.replaceChildren(...(found.length
      ? found.slice(0, 12).map((each) => sw.h("a", { class: `alert ${each.level}`, href: each.href }, each.text))
      : [sw.h("span", { class: "fine" }, "Nothing needs a look.")]));
    if (found.length > 12) attention.append(sw.h("span", { class: "note" }, `and ${found.length - 12} more`));
  };

  const update = () => {
    const [fromS, toS] = shownRange();
    showGpus(fromS, toS);
    showServers(fromS, toS);
    showMemory(fromS, toS);
    showJobs();
    showAttention();
    const last = [...sw.data.kind("events")].sort((a, b) => Number(b[0]) - Number(a[0])).slice(0, 12);
    events.replaceChildren(...last.map(([id, each]) => sw.eventLine(id, each)));
  };

  return {
    element: sw.h("section", { class: "page overview" },
      live ? sw.h("div", { class: "tiles" }, jobs.element, gpus.element, servers.element, memory.element) : null,
      live ? ranges : null,
      sw.h("div", { class: "grid" },
        sw.h("div", { class: "card" }, titles.gpus, places.gpus),
        sw.h("div", { class: "card" }, titles.servers, places.servers),
        sw.h("div", { class: "card" }, titles.memory, places.memory)),
      sw.h("div", { class: "grid" },
        live ? sw.h("div", { class: "card" }, sw.h("h2", {}, "Needs a look"), attention) : null,
        sw.h("div", { class: "card" }, sw.h("h2", {}, "Last events"), events))),
    update,
    charts: () => charts,
  };
};

/** Show one event as a line; a job's name leads to its page. */
sw.eventLine = (id, each) => sw.h("li", { "data-id": id },
  sw.h("time", {}, sw.clock(each.at_s)),
  each.job ? sw.h("a", { href: `#/jobs/${encodeURIComponent(each.job)}`, class: `fact-${each.fact}` }, each.text) : sw.h("span", {}, each.text));
