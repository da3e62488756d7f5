"use strict";
/* Pages that are one table each: jobs, nodes, aggregators, memory, tenants, events. */

sw.column = (key, title, show, more = {}) => ({
  key, title, get: (row) => row[key], text: (row) => show(row[key], row), ...more,
});

sw.text = (value) => (sw.known(value) && value !== "" ? String(value) : sw.NOTHING);

const RANK = { running: 0, starting: 1, stopping: 2, pending: 3, paused: 4, failed: 5, completed: 6, cancelled: 7 };

/** Show how far it is: 7,210/20,000. */
sw.progress = (row) => {
  if (!sw.known(row.iteration)) return sw.NOTHING;
  return sw.count(row.iteration) + (row.iterations ? `/${sw.count(row.iterations)}` : "");
};

sw.jobRows = () => sw.data.rows("jobs").map((row) => {
  const [iteration, speed, eta_s, loss, moves] = sw.data.get("going", row.id) ?? [];
  return { ...row, iteration, speed, eta_s, loss, moves };
});

sw.pages.jobs = () => {
  const file = sw.data.meta.kind !== "live";
  const nowS = sw.data.nowS;
  const age = (row) => (row.finished_s || nowS()) - row.submitted_s;
  const table = sw.table({
    name: "jobs",
    sort: ["state", false],
    open: (row) => { location.hash = `#/jobs/${encodeURIComponent(row.id)}`; },
    empty: "No jobs yet: slackwater submit -- python train.py",
    columns: [
      sw.column("id", "job", sw.text, { width: "minmax(110px, 2fr)" }),
      sw.column("state", "state", (state, row) => (row.held ? `${state}, held` : state), {
        get: (row) => RANK[row.state] * 1e12 - (row.finished_s || row.submitted_s), cell: (row) => sw.state(row.state), width: "96px",
      }),
      sw.column("tenant", "tenant", sw.text, { wide: true, width: "minmax(84px, .8fr)" }),
      sw.column("has", "GPUs", (_, row) => (row.gpus ? `${row.has}/${row.gpus}` : sw.NOTHING), { align: "right", wide: true, width: "64px" }),
      sw.column("iteration", "progress", (_, row) => sw.progress(row), { align: "right", width: "minmax(122px, 1fr)", narrow: "98px" }),
      sw.column("speed", "speed", sw.speed, { align: "right", wide: true, width: "86px" }),
      sw.column("loss", "loss", (loss) => (sw.known(loss) ? sw.percent(Math.max(0, loss), 1) : sw.NOTHING), { align: "right", wide: true, width: "70px" }),
      sw.column("eta_s", file ? "waited" : "left", sw.duration, { align: "right", wide: true, width: "70px" }),
      sw.column("age", file ? "took" : "age", (_, row) => sw.duration(age(row)), { get: age, align: "right", width: "64px" }),
      sw.column("nodes", "on", (nodes) => nodes.map(([node, number]) => `${node} (${number})`).join(", ") || sw.NOTHING, {
        get: (row) => row.nodes[0]?.[0], wide: true, width: "minmax(70px, 1fr)",
      }),
      sw.column("reason", "reason", sw.text, { wide: true, width: "minmax(120px, 2.2fr)" }),
    ],
  });
  return { element: sw.h("section", { class: "page" }, table.element), update: () => table.update(sw.jobRows()), table };
};

sw.pages.nodes = () => {
  const table = sw.table({
    name: "nodes",
    sort: ["id", false],
    empty: "No worker nodes are heard.",
    columns: [
      sw.column("id", "node", sw.text, { width: "minmax(90px, 1fr)" }),
      sw.column("alive", "state", (_, row) => (row.alive ? (row.cordoned ? "cordoned" : "up") : "silent"), {
        cell: (row) => sw.state(row.alive ? (row.cordoned ? "cordoned" : "up") : "silent"), width: "96px",
      }),
      sw.column("gpus_used", "GPUs in use", (_, row) => (row.gpus ? `${row.gpus_used} of ${row.gpus}` : sw.NOTHING), { align: "right", width: "100px" }),
      sw.column("gpu_types", "type", (types) => types.join(", ") || sw.NOTHING, { get: (row) => row.gpu_types[0], wide: true }),
      sw.column("slots_used", "slots in use", (_, row) => `${row.slots_used} of ${row.slots}`, { align: "right", width: "104px" }),
      sw.column("jobs", "jobs", sw.count, { align: "right", width: "60px" }),
      sw.column("cores", "cores", (cores) => (cores ? sw.figure(cores) : sw.NOTHING), { align: "right", wide: true, width: "70px" }),
      sw.column("memory_bytes", "memory", (bytes) => (bytes ? sw.bytes(bytes) : sw.NOTHING), { align: "right", wide: true, width: "92px" }),
      sw.column("rack", "rack", sw.text, { wide: true, width: "80px" }),
      sw.column("faults", "faults", (faults) => faults.join("; ") || sw.NOTHING, { get: (row) => row.faults.length, wide: true, width: "minmax(100px, 2fr)" }),
    ],
  });
  return { element: sw.h("section", { class: "page" }, table.element), update: () => table.update(sw.data.rows("nodes")), table };
};

sw.pages.aggregators = () => {
  const state = (row) => (!row.alive ? "silent" : row.drain ? row.drain : row.cluster ? "in use" : "free");
  const table = sw.table({
    name: "aggregators",
    sort: ["id", false],
    empty: sw.data.meta.tenant ? "Tenants do not see aggregators." : "No aggregators are heard.",
    columns: [
      sw.column("id", "aggregator", sw.text, { width: "minmax(90px, 1fr)" }),
      sw.column("state", "state", (_, row) => state(row), { get: state, cell: (row) => sw.state(state(row)), width: "96px" }),
      sw.column("node", "node", sw.text, { wide: true }),
      sw.column("cluster", "cluster", (cluster, row) => sw.text(cluster) + (row.temporary_for ? `, to measure ${row.temporary_for}` : ""), { wide: true, width: "minmax(90px, 1.4fr)" }),
      sw.column("jobs", "jobs", sw.count, { align: "right", width: "60px" }),
      sw.column("busy", "busy", (busy) => sw.percent(busy), { align: "right", width: "70px" }),
      sw.column("moved_bytes_s", "traffic", (rate) => (sw.known(rate) ? `${sw.bytes(rate)}/s` : sw.NOTHING), { align: "right", width: "104px" }),
      sw.column("held_bytes", "holds", sw.bytes, { align: "right", wide: true, width: "92px" }),
      sw.column("memory_bytes", "of", (bytes) => (bytes ? sw.bytes(bytes) : sw.NOTHING), { align: "right", wide: true, width: "92px" }),
    ],
  });
  return { element: sw.h("section", { class: "page" }, table.element), update: () => table.update(sw.data.rows("aggregators")), table };
};

sw.pages.memory = () => {
  const lenders = sw.table({
    name: "lenders",
    sort: ["id", false],
    empty: "No machine lends memory: slackwater run slabd",
    columns: [
      sw.column("id", "lender", sw.text, { width: "minmax(90px, 1fr)" }),
      sw.column("node", "node", sw.text, { wide: true }),
      sw.column("lending", "state", (lending) => (lending ? "lends" : "drains"), { cell: (row) => sw.state(row.lending ? "lends" : "drains"), width: "86px" }),
      sw.column("lent", "lent", (_, row) => sw.bytes(row.lent_slabs * row.slab_bytes), { get: (row) => row.lent_slabs * row.slab_bytes, align: "right", width: "96px" }),
      sw.column("free", "ready", (_, row) => sw.bytes(row.free_slabs * row.slab_bytes), { get: (row) => row.free_slabs * row.slab_bytes, align: "right", width: "96px" }),
      sw.column("used_bytes", "used by itself", sw.bytes, { align: "right", wide: true, width: "120px" }),
      sw.column("total_bytes", "of", sw.bytes, { align: "right", wide: true, width: "96px" }),
      sw.column("devices", "devices", sw.count, { align: "right", width: "80px" }),
      sw.column("pressure", "pressure", (part) => sw.percent(part / 100, 1), { align: "right", wide: true, width: "90px" }),
    ],
  });
  const devices = sw.table({
    name: "devices",
    sort: ["id", false],
    empty: "No device uses memory of others: slackwater memory export",
    columns: [
      sw.column("id", "device", sw.text, { width: "minmax(90px, 1fr)" }),
      sw.column("node", "node", sw.text, { wide: true }),
      sw.column("state", "state", sw.text, { cell: (row) => sw.state(row.state), width: "96px" }),
      sw.column("size_bytes", "size", sw.bytes, { align: "right", width: "96px" }),
      sw.column("mapped_spans", "mapped", (_, row) => `${row.mapped_spans} of ${row.spans}`, { align: "right", width: "110px" }),
      sw.column("resilience", "kept as", sw.text, { wide: true }),
      sw.column("activity", "pages/s", sw.figure, { align: "right", width: "86px" }),
      sw.column("latency", "p50 / p99 µs", (of) => of.map(([cause, p50, p99]) => `${cause} ${sw.figure(p50)}/${sw.figure(p99)}`).join(", ") || sw.NOTHING, { get: (row) => row.latency[0]?.[1], wide: true, width: "minmax(120px, 2fr)" }),
      sw.column("reason", "reason", sw.text, { wide: true }),
    ],
  });
  return {
    element: sw.h("section", { class: "page two" }, sw.h("h2", {}, "Machines that lend"), lenders.element, sw.h("h2", {}, "Devices that borrow"), devices.element),
    update: () => {
      lenders.update(sw.data.rows("lenders"));
      devices.update(sw.data.rows("devices"));
    },
    table: lenders,
  };
};

sw.pages.tenants = () => {
  const hours = (value) => (sw.known(value) ? value.toLocaleString("en-US", { maximumFractionDigits: 2, minimumFractionDigits: 2 }) : sw.NOTHING);
  const saved = (row) => (row.server_h ? 1 - row.shared_h / row.server_h : null);
  const table = sw.table({
    name: "tenants",
    sort: ["id", false],
    empty: "No tenant has limits or jobs.",
    columns: [
      { key: "id", title: "tenant", get: (row) => row.id, text: (row) => row.id || "(none)", width: "minmax(90px, 1fr)" },
      sw.column("running", "running", sw.count, { align: "right", width: "80px" }),
      sw.column("waiting", "waiting", sw.count, { align: "right", width: "80px" }),
      sw.column("cpu", "cores asked", (cpu, row) => (sw.known(cpu) ? `${sw.figure(cpu)} of ${sw.figure(row.pool_cpu * row.cpu_fraction)}` : sw.NOTHING), { align: "right", wide: true, width: "120px" }),
      sw.column("loss", "worst loss", (loss) => (sw.known(loss) ? sw.percent(Math.max(0, loss), 1) : sw.NOTHING), { align: "right", wide: true, width: "96px" }),
      sw.column("gpu_h", "GPU h", hours, { align: "right", width: "86px" }),
      sw.column("core_h", "core h", hours, { align: "right", width: "86px" }),
      sw.column("server_h", "server h", hours, { align: "right", wide: true, width: "86px" }),
      sw.column("shared_h", "shared h", hours, { align: "right", wide: true, width: "86px" }),
      sw.column("saved", "saved", (_, row) => sw.percent(saved(row)), { get: saved, align: "right", width: "76px" }),
    ],
  });
  return {
    element: sw.h("section", { class: "page" }, sw.h("p", { class: "note" }, "Use of the last 30 days. Server h: core hours that parameter servers of the jobs' own would have held; shared h: of their parts of shared aggregators."), table.element),
    update: () => table.update(sw.data.rows("tenants")),
    table,
  };
};

sw.pages.events = () => {
  const table = sw.table({
    name: "events",
    sort: ["at_s", true],
    open: (row) => { if (row.job) location.hash = `#/jobs/${encodeURIComponent(row.job)}`; },
    empty: "Nothing happened yet.",
    columns: [
      { key: "at_s", title: "time", get: (row) => Number(row.id), text: (row) => sw.clock(row.at_s), width: "minmax(90px, 160px)" },
      sw.column("kind", "about", sw.text, { wide: true, width: "100px" }),
      sw.column("fact", "fact", sw.text, { wide: true, width: "150px" }),
      sw.column("text", "what happened", sw.text, { width: "minmax(200px, 4fr)" }),
    ],
  });
  return { element: sw.h("section", { class: "page" }, table.element), update: () => table.update(sw.data.rows("events")), table };
};
