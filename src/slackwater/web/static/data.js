"use strict";
/* What the page shows: entries by kind and id, from a stream of changes or from the file itself. */

sw.data = (() => {
  const kinds = {};
  const listeners = new Set();
  const meta = { kind: "live", name: "", acts: false, tenant: "", relative: false };
  let version = 0;
  let offsetS = 0;
  let fixedS = null;
  let scheduled = false;
  let connection = "connecting";
  const EVENTS_MAX = 2000;

  const kind = (name) => (kinds[name] ??= new Map());

  const notify = () => {
    if (scheduled) return;
    scheduled = true;
    requestAnimationFrame(() => {
      scheduled = false;
      for (const listener of [...listeners]) listener();
    });
  };

  const apply = (message) => {
    if (message.whole) for (const each of Object.values(kinds)) each.clear();
    for (const [name, changes] of Object.entries(message.changes)) {
      const entries = kind(name);
      for (const [id, value] of Object.entries(changes)) {
        if (value === null) entries.delete(id);
        else entries.set(id, value);
      }
    }
    const events = kind("events");
    if (events.size > EVENTS_MAX) {
      const old = [...events.keys()].map(Number).sort((a, b) => a - b);
      for (const id of old.slice(0, old.length - EVENTS_MAX)) events.delete(String(id));
    }
    for (const name of ["kind", "name", "acts", "tenant", "relative"]) {
      if (name in message) meta[name] = message[name];
    }
    version = message.version ?? 0;
    offsetS = message.now_s - Date.now() / 1000;
    notify();
  };

  const connect = () => {
    const source = new EventSource("/api/stream");
    const told = (state) => {
      if (connection !== state) {
        connection = state;
        notify();
      }
    };
    source.onopen = () => told("live");
    source.onmessage = (event) => {
      told("live");
      apply(JSON.parse(event.data));
    };
    source.onerror = () => {
      told("lost");
      if (source.readyState === EventSource.CLOSED) {
        // It was refused, and does not try again by itself.
        setTimeout(connect, 5000);
      }
    };
  };

  const begin = () => {
    const embedded = document.getElementById("report");
    if (embedded === null) {
      connect();
      return null;
    }
    const report = JSON.parse(embedded.textContent);
    connection = "file";
    fixedS = report.now_s;
    apply({ ...report, whole: true, changes: report.changes ?? {} });
    return report;
  };

  return {
    begin,
    kind,
    meta,
    get: (name, id) => kind(name).get(id),
    rows: (name) => [...kind(name)].map(([id, value]) => ({ id, ...value })),
    nowS: () => (fixedS === null ? Date.now() / 1000 + offsetS : fixedS),
    version: () => version,
    connection: () => connection,
    listen: (listener) => {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
  };
})();
