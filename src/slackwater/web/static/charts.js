"use strict";
/* Charts over time by uPlot, and the timeline of a job. Series are steps: each point holds until the
   next one. */

sw.PALETTE = ["c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8"];

/**
 * Draw a chart that follows the width of its place.
 * options: {height, series: [{label, color, fill, stepped, dash, hidden}], stacked, yText, yMax}
 * Returns {element, show(xs, rows, range)}: rows are one array of values a series.
 */
sw.chart = (options) => {
  const place = sw.h("div", { class: "chart" });
  const relative = sw.data.meta.relative;
  const yText = options.yText ?? sw.figure;
  let plot = null;
  let raw = [];
  let range = null;
  const font = "12px system-ui, sans-serif";

  const xText = (x, stepS) => {
    if (options.xText) return options.xText(x);
    if (relative) return sw.duration(x);
    const at = new Date(x * 1000);
    if (stepS >= 86400) return at.toLocaleDateString("en-CA");
    return at.toLocaleTimeString("en-GB").slice(0, stepS < 60 ? 8 : 5);
  };

  const axis = (more) => ({
    stroke: sw.color("muted"),
    font,
    grid: { stroke: sw.color("line"), width: 1 },
    ticks: { stroke: sw.color("line"), width: 1 },
    ...more,
  });

  const shownSeries = (each, index) => ({
    label: each.label,
    stroke: sw.color(each.color),
    width: each.width ?? 1.5,
    dash: each.dash,
    fill: options.stacked || !each.fill ? undefined : `color-mix(in srgb, ${sw.color(each.color)} 18%, transparent)`,
    paths: each.stepped === false ? undefined : uPlot.paths.stepped({ align: 1 }),
    spanGaps: each.stepped === false,
    points: { show: each.points ?? false, size: 5 },
    value: (_, __, ___, at) => (at === null || at === undefined ? sw.NOTHING : yText(raw[index]?.[at])),
  });

  const make = (width) => {
    const series = options.series.map(shownSeries);
    let bands;
    if (options.stacked) {
      const fills = options.series.map((each) => `color-mix(in srgb, ${sw.color(each.color)} 55%, transparent)`);
      const last = options.series.filter((each) => !each.alone).length;
      series.forEach((each, index) => {
        if (index === 0) each.fill = fills[0];
        if (index < last) each.width = 0.5;
      });
      bands = [];
      for (let index = 1; index < last; index += 1) {
        bands.push({ series: [index + 1, index], fill: fills[index] });
      }
    }
    return new uPlot(
      {
        width,
        height: options.height ?? 200,
        scales: {
          x: { time: !relative && !options.plainX, range: () => range ?? [0, 1] },
          y: { range: (_, __, most) => [options.yMin ?? 0, options.yMax ?? Math.max(1, (most ?? 0) * 1.08)] },
        },
        axes: [
          axis({ space: 76, values: (_, ticks, __, ___, stepS) => ticks.map((x) => xText(x, stepS)) }),
          axis({ size: options.ySize ?? 56, values: (_, ticks) => ticks.map(yText) }),
        ],
        series: [{ value: (_, x) => (sw.known(x) ? (options.xText ?? sw.clock)(x) : sw.NOTHING), label: options.xLabel ?? "time" }, ...series],
        bands,
        legend: { show: options.legend ?? true, live: true },
        cursor: { y: false, drag: { x: false, y: false } },
      },
      [[], ...series.map(() => [])],
      place,
    );
  };

  const stackedUp = (rows) => {
    const sums = [];
    const found = [];
    rows.forEach((row, index) => {
      if (options.series[index].alone) {
        found.push(row);
        return;
      }
      row.forEach((value, at) => {
        sums[at] = (sums[at] ?? 0) + (value ?? 0);
      });
      found.push([...sums]);
    });
    return found;
  };

  let shown = null;
  const draw = () => {
    const width = Math.floor(place.clientWidth);
    if (!shown || width < 40) return;
    if (plot === null) plot = make(width);
    else if (plot.width !== width) plot.setSize({ width, height: options.height ?? 200 });
    raw = shown.rows;
    range = shown.range;
    plot.setData([shown.xs, ...(options.stacked ? stackedUp(shown.rows) : shown.rows)]);
    // Without a cursor on it the legend tells the newest values.
    if (plot.cursor.idx === null || plot.cursor.left < 0) plot.setLegend({ idx: shown.xs.length - 1 }, false);
  };
  new ResizeObserver(draw).observe(place);

  return {
    element: place,
    show: (xs, rows, shownRange) => {
      shown = { xs, rows, range: shownRange };
      draw();
    },
    values: () => ({ xs: shown?.xs ?? [], rows: shown?.rows ?? [] }),
  };
};

/** Sum up changes [second, difference] to levels [second, level], ascending. */
sw.levels = (changes) => {
  const sorted = [...changes].sort((a, b) => a[0] - b[0]);
  const found = [];
  let level = 0;
  for (const [at, change] of sorted) {
    level += change;
    const last = found[found.length - 1];
    if (last && last[0] === at) last[1] = level;
    else found.push([at, level]);
  }
  return found;
};

/** Return the level at a time of steps that ascend by time; 0 before the first. */
sw.levelAt = (steps, at) => {
  let low = 0;
  let high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle][0] <= at) low = middle + 1;
    else high = middle;
  }
  return low ? steps[low - 1][1] : 0;
};

/** Integrate steps over [from, to]. */
sw.area = (steps, from, to) => {
  let sum = 0;
  for (let index = 0; index < steps.length; index += 1) {
    const begin = Math.max(from, steps[index][0]);
    const end = Math.min(to, index + 1 < steps.length ? steps[index + 1][0] : to);
    if (end > begin) sum += steps[index][1] * (end - begin);
  }
  return sum;
};

/** Sample several steps at the times at which any changes within [from, to]: {xs, rows}. */
sw.sampled = (all, from, to, most = 1200) => {
  const times = new Set([from, to]);
  for (const steps of all) for (const [at] of steps) if (at > from && at < to) times.add(at);
  let xs = [...times].sort((a, b) => a - b);
  if (xs.length > most) xs = Array.from({ length: most }, (_, i) => from + ((to - from) * i) / (most - 1));
  return { xs, rows: all.map((steps) => xs.map((at) => sw.levelAt(steps, at))) };
};

/** Draw when a job was in which state, what moved and what befell it. */
sw.timeline = (life, fromS, toS) => {
  const spanS = Math.max(1e-9, toS - fromS);
  const place = (atS) => `${Math.min(100, Math.max(0, (100 * (atS - fromS)) / spanS))}%`;
  const bar = sw.h("div", { class: "timeline-bar", role: "img", "aria-label": "states over time" });
  const seen = new Set();
  life.stretches.forEach(([state, beginS, endS, held], index) => {
    const untilS = endS ?? toS;
    if (untilS < fromS || untilS === beginS) return;
    const [reason, nodes] = life.details?.[index] ?? ["", []];
    const on = nodes.map(([node, number]) => `${node} (${number})`).join(", ");
    const title = [
      `${state} for ${sw.duration(untilS - beginS)}, from ${sw.clock(beginS)}`,
      held ? `holds ${held} on ${on || "its nodes"}` : "",
      reason,
    ].filter(Boolean).join("\n");
    const part = sw.h("div", { class: `stretch state-${state}`, title });
    part.style.left = place(beginS);
    part.style.width = `max(2px, ${(100 * (Math.min(untilS, toS) - Math.max(beginS, fromS))) / spanS}%)`;
    bar.append(part);
    seen.add(state);
  });
  const moves = sw.h("div", { class: "timeline-marks" });
  for (const [atS, , sources, targets, cause] of life.moves ?? []) {
    const mark = sw.h("span", { class: "mark move", title: `${sw.clock(atS)}: moves from ${sources.join(", ")} to ${targets.join(", ")} (${cause})` }, "▲");
    mark.style.left = place(atS);
    moves.append(mark);
    seen.add("move");
  }
  for (const [atS, fact] of life.marks ?? []) {
    const mark = sw.h("span", { class: "mark fact", title: `${sw.clock(atS)}: ${fact}` }, "●");
    mark.style.left = place(atS);
    moves.append(mark);
    seen.add("event");
  }
  const scale = sw.h("div", { class: "timeline-scale" },
    sw.h("span", {}, sw.clock(fromS)), sw.h("span", {}, sw.clock(toS)));
  const names = { move: "▲ buckets move", event: "● something befell it" };
  const legend = sw.h("div", { class: "legend" },
    [...seen].map((each) => each in names
      ? sw.h("span", { class: `key mark-${each}` }, names[each])
      : sw.h("span", { class: "key" }, sw.h("i", { class: `swatch state-${each}` }), each)));
  return sw.h("div", { class: "timeline" }, bar, moves, scale, legend);
};
