"use strict";
/* The first page of a report's file: its figures, notes, charts and tables, whatever they are. */

sw.pages.summary = () => {
  const report = sw.report;
  const drawn = [];
  const chart = (each) => {
    const made = sw.chart({
      height: each.height ?? 230, stacked: each.stacked ?? false, yMax: each.y_max ?? undefined,
      plainX: true, xText: each.x === "seconds" ? sw.duration : sw.figure, xLabel: each.x, legend: true,
      yText: each.y === "bytes" ? sw.bytes : each.y === "share" ? (value) => sw.percent(value) : sw.figure,
      ySize: each.y === "bytes" ? 76 : 56,
      series: each.series.map((series, index) => ({
        label: series.label, color: sw.PALETTE[index % sw.PALETTE.length], stepped: series.step ?? true,
        dash: series.dash ? [5, 4] : undefined, fill: series.fill ?? false,
      })),
    });
    drawn.push([made, each]);
    return sw.h("div", { class: "card" }, sw.h("h2", {}, each.title), made.element);
  };
  const table = (each) => sw.h("div", { class: "card whole" }, sw.h("h2", {}, each.title), sw.h("div", { class: "scroll-x" },
    sw.h("table", { class: "plain" },
      sw.h("thead", {}, sw.h("tr", {}, each.columns.map((title, index) => sw.h("th", { class: each.numbers?.includes(index) ? "right" : "" }, title)))),
      sw.h("tbody", {}, each.rows.map((row) => sw.h("tr", {}, row.map((cell, index) => sw.h("td", { class: each.numbers?.includes(index) ? "right" : "" }, cell ?? sw.NOTHING))))))));
  const element = sw.h("section", { class: "page summary" },
    sw.h("h1", {}, report.title),
    report.subtitle ? sw.h("p", { class: "note" }, report.subtitle) : null,
    sw.h("div", { class: "tiles" }, (report.figures ?? []).map((each) => sw.h("div", { class: "tile" },
      sw.h("b", { class: "figure" }, each.value), sw.h("span", { class: "note" }, each.label)))),
    (report.notes ?? []).map((each) => sw.h("p", { class: each.bad ? "alert bad" : "note" }, each.text)),
    sw.h("div", { class: "grid" }, (report.charts ?? []).map(chart)),
    (report.images ?? []).map((each) => sw.h("figure", { class: "card whole" }, sw.h("img", { src: each.src, alt: each.caption }), sw.h("figcaption", {}, each.caption))),
    (report.tables ?? []).map(table),
    report.story?.length ? sw.h("div", { class: "card whole" }, sw.h("h2", {}, "What happened"),
      sw.h("ol", { class: "events" }, report.story.map(([atS, text]) => sw.h("li", {}, sw.h("time", {}, `${atS.toFixed(1)} s`), sw.h("span", {}, text))))) : null);
  return {
    element,
    update: () => {
      for (const [made, each] of drawn) {
        const all = each.series.map((series) => series.points);
        const xs = all.flatMap((points) => points.map((point) => point[0]));
        const range = [each.x_min ?? Math.min(0, ...xs), each.x_max ?? Math.max(1e-9, ...xs)];
        const sampled = each.series.every((series) => series.step ?? true)
          ? sw.sampled(all, range[0], range[1])
          : sw.joined(all);
        made.show(sampled.xs, sampled.rows, range);
      }
    },
  };
};

/** Put the points of several lines on one axis: null where a line has none. */
sw.joined = (all) => {
  const xs = [...new Set(all.flatMap((points) => points.map((point) => point[0])))].sort((a, b) => a - b);
  return { xs, rows: all.map((points) => { const by = new Map(points); return xs.map((x) => by.get(x) ?? null); }) };
};
