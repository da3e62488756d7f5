"use strict";
/* A table of thousands of rows: only those in sight are elements. It sorts, filters, and is walked
   with the keyboard. */

sw.ROW_PX = 32;

/**
 * options: {name, columns: [{key, title, get(row), text(row), cell(row), align, wide, width, narrow}],
 *           sort: [key, descending], open(row), words(row), empty}
 * `get` gives what is sorted by, `text` what is shown, `cell` an element in its place. `wide` columns
 * are left out on narrow screens, where the others are as wide as `narrow`.
 */
sw.table = (options) => {
  let rows = [];
  let shown = [];
  let filter = "";
  let [sortKey, descending] = options.sort;
  let selected = null;
  const elements = new Map();
  const columns = options.columns;
  const template = columns.map((each) => each.width ?? "minmax(70px, 1fr)").join(" ");
  const narrow = columns.filter((each) => !each.wide).map((each) => each.narrow ?? (each.width ?? "1fr").replace(/minmax\([^,]*,\s*([^)]*)\)/, "minmax(0, $1)")).join(" ");
  const head = sw.h("div", { class: "thead", role: "row" });
  const body = sw.h("div", { class: "tbody", role: "rowgroup" });
  const status = sw.h("div", { class: "table-status", "aria-live": "polite" });
  const scroller = sw.h("div", { class: "scroller", tabindex: "0", role: "table", "aria-label": options.name }, head, body);
  scroller.style.setProperty("--columns", template);
  scroller.style.setProperty("--columns-narrow", narrow);

  const classOf = (column) => `${column.align === "right" ? "right" : ""} ${column.wide ? "wide" : ""}`.trim();

  const drawHead = () => {
    head.replaceChildren(...columns.map((column) => {
      const sorted = column.key === sortKey;
      const button = sw.h("button", { type: "button", onclick: () => sortBy(column.key), title: `sort by ${column.title}` },
        column.title, sorted ? (descending ? " ▾" : " ▴") : "");
      return sw.h("div", { role: "columnheader", class: classOf(column), "aria-sort": sorted ? (descending ? "descending" : "ascending") : "none" }, button);
    }));
  };

  const sortBy = (key) => {
    if (key === sortKey) descending = !descending;
    else [sortKey, descending] = [key, false];
    drawHead();
    arrange();
  };

  const order = (a, b) => {
    const missingA = !sw.known(a);
    const missingB = !sw.known(b);
    if (missingA || missingB) return missingA - missingB;
    return typeof a === "number" && typeof b === "number" ? a - b : sw.natural(String(a), String(b));
  };

  const words = (row) => (options.words ? options.words(row) : columns.map((each) => each.text(row)).join(" ")).toLowerCase();

  const matches = (row) => {
    const text = words(row);
    return filter.split(/\s+/).filter(Boolean).every((word) => {
      const [key, value] = word.split(":");
      const column = value && columns.find((each) => each.key === key);
      return column ? column.text(row).toLowerCase().includes(value) : text.includes(word);
    });
  };

  const arrange = () => {
    const column = columns.find((each) => each.key === sortKey);
    shown = filter ? rows.filter(matches) : [...rows];
    const sign = descending ? -1 : 1;
    shown.sort((a, b) => sign * order(column.get(a), column.get(b)) || sw.natural(a.id, b.id));
    body.style.height = `${Math.max(1, shown.length) * sw.ROW_PX}px`;
    status.textContent = filter || shown.length !== rows.length
      ? `${sw.count(shown.length)} of ${sw.count(rows.length)}`
      : sw.count(rows.length);
    draw();
  };

  const draw = () => {
    const first = Math.max(0, Math.floor((scroller.scrollTop - sw.ROW_PX) / sw.ROW_PX) - 4);
    const last = Math.min(shown.length, first + Math.ceil((scroller.clientHeight || 600) / sw.ROW_PX) + 10);
    const wanted = new Set();
    for (let index = first; index < last; index += 1) {
      const row = shown[index];
      wanted.add(row.id);
      let element = elements.get(row.id);
      if (element === undefined) {
        element = sw.h("div", { class: "tr", role: "row", "data-id": row.id, onclick: () => select(row.id, true) },
          columns.map((column) => sw.h("div", { class: classOf(column), role: "cell" })));
        elements.set(row.id, element);
        body.append(element);
      }
      element.style.top = `${index * sw.ROW_PX}px`;
      element.classList.toggle("selected", row.id === selected);
      fill(element, row);
    }
    for (const [id, element] of elements) {
      if (!wanted.has(id)) {
        element.remove();
        elements.delete(id);
      }
    }
    if (!shown.length) {
      const text = rows.length ? "Nothing matches the filter." : options.empty;
      if (empty.textContent !== text) empty.textContent = text;
      if (!empty.isConnected) body.append(empty);
    } else empty.remove();
  };
  const empty = sw.h("div", { class: "empty" });

  const fill = (element, row) => {
    columns.forEach((column, index) => {
      const cell = element.children[index];
      const text = column.text(row);
      if (cell.dataset.text === text) return;
      cell.dataset.text = text;
      cell.replaceChildren(column.cell ? column.cell(row) : text);
      cell.title = column.title ? `${column.title}: ${text}` : text;
    });
  };

  const select = (id, open) => {
    selected = id;
    draw();
    const row = shown.find((each) => each.id === id);
    if (open && row && options.open) options.open(row);
  };

  const walk = (event) => {
    const at = shown.findIndex((each) => each.id === selected);
    const page = Math.max(1, Math.floor(scroller.clientHeight / sw.ROW_PX) - 2);
    const steps = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1, PageDown: page, PageUp: -page, Home: -1e9, End: 1e9 };
    if (event.key in steps && shown.length) {
      const next = Math.min(shown.length - 1, Math.max(0, at + steps[event.key]));
      const top = next * sw.ROW_PX;
      if (top < scroller.scrollTop) scroller.scrollTop = top;
      else if (top + 3 * sw.ROW_PX > scroller.scrollTop + scroller.clientHeight) {
        scroller.scrollTop = top + 3 * sw.ROW_PX - scroller.clientHeight;
      }
      select(shown[next].id, false);
      event.preventDefault();
    } else if (event.key === "Enter" && selected !== null) {
      select(selected, true);
    }
  };

  scroller.addEventListener("scroll", draw, { passive: true });
  scroller.addEventListener("keydown", walk);
  new ResizeObserver(draw).observe(scroller);
  drawHead();

  const box = sw.h("input", {
    type: "search", class: "filter", placeholder: "filter  ( / )", "aria-label": `filter ${options.name}`,
    oninput: (event) => {
      filter = event.target.value.trim().toLowerCase();
      scroller.scrollTop = 0;
      arrange();
    },
    onkeydown: (event) => {
      if (event.key === "ArrowDown" || event.key === "Enter") scroller.focus();
    },
  });

  return {
    element: sw.h("div", { class: "table" }, sw.h("div", { class: "table-tools" }, box, options.tools ?? null, status), scroller),
    update: (newRows) => {
      rows = newRows;
      arrange();
    },
    focus: () => scroller.focus(),
    filter: (text) => {
      box.value = text;
      box.dispatchEvent(new Event("input"));
    },
  };
};
