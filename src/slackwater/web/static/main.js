"use strict";
/* The frame: tabs, the page that the address names, keys, colors, and who is signed in. */

sw.act = async (job, action) => {
  if (action === "cancel" && !confirm(`Cancel job ${job}?`)) return;
  const path = `/api/jobs/${encodeURIComponent(job)}/${action}`;
  try {
    await sw.ask(path, { method: "POST" });
  } catch (error) {
    if (error.status !== 401) throw error;
    await sw.signIn();
    await sw.ask(path, { method: "POST" });
  }
};

/** Ask who it is, until the bus lets them in. */
sw.signIn = () => new Promise((resolve, reject) => {
  const user = sw.h("input", { name: "user", autocomplete: "username" });
  const password = sw.h("input", { name: "password", type: "password", autocomplete: "current-password" });
  const token = sw.h("input", { name: "token", type: "password", autocomplete: "off" });
  const why = sw.h("p", { class: "alert bad", hidden: true });
  const send = async (event) => {
    event.preventDefault();
    try {
      const body = JSON.stringify({ user: user.value, password: password.value, token: token.value });
      await sw.ask("/api/session", { method: "POST", body });
      dialog.close();
      resolve();
    } catch (error) {
      why.textContent = error.message;
      why.hidden = false;
    }
  };
  const dialog = sw.h("dialog", { onclose: () => { dialog.remove(); reject(new Error("not signed in")); } },
    sw.h("form", { onsubmit: send }, sw.h("h2", {}, "Sign in"),
      sw.h("p", { class: "note" }, "As a user of the cluster's bus, whose permissions decide what you may do."),
      sw.h("label", {}, "user", user), sw.h("label", {}, "password", password), sw.h("label", {}, "or a token", token), why,
      sw.h("div", { class: "actions" }, sw.h("button", { type: "submit" }, "sign in"), sw.h("button", { type: "button", onclick: () => dialog.close() }, "close"))));
  document.body.append(dialog);
  dialog.showModal();
});

sw.main = () => {
  sw.report = sw.data.begin();
  const live = sw.report === null;
  const has = (kind) => live || sw.data.kind(kind).size > 0;
  const tabs = [
    live ? ["", "Overview", "overview"] : ["", "Summary", "summary"],
    ...(!live && has("lives") ? [["pools", "Over time", "overview"]] : []),
    ...(has("jobs") ? [["jobs", "Jobs", "jobs"]] : []),
    ...(live ? [["nodes", "Nodes", "nodes"], ["aggregators", "Aggregators", "aggregators"], ["memory", "Memory", "memory"], ["tenants", "Tenants", "tenants"]] : []),
    ...(has("events") ? [["events", "Events", "events"]] : []),
  ];
  const nav = sw.h("nav", { "aria-label": "pages" }, tabs.map(([path, title]) => sw.h("a", { href: `#/${path}` }, title)));
  const status = sw.h("span", { class: "status", role: "status" });
  const name = sw.h("span", { class: "cluster" });
  const theme = sw.h("button", { type: "button", class: "theme", title: "light or dark  ( t )", "aria-label": "light or dark", onclick: () => turnTheme() }, "◐");
  const keysShown = sw.h("button", { type: "button", class: "theme", title: "keys  ( ? )", "aria-label": "keys", onclick: () => help() }, "?");
  const place = sw.h("main", { id: "main" });
  document.getElementById("app").append(
    sw.h("header", {}, sw.h("a", { class: "brand", href: "#/" }, "Slackwater"), name, nav, status, keysShown, theme), place);
  let page = null;

  const turnTheme = () => {
    const dark = document.documentElement.dataset.theme
      ? document.documentElement.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    document.documentElement.dataset.theme = dark ? "light" : "dark";
    try { localStorage.setItem("theme", document.documentElement.dataset.theme); } catch { /* A file may keep nothing. */ }
    go();
  };
  try {
    const kept = localStorage.getItem("theme");
    if (kept) document.documentElement.dataset.theme = kept;
  } catch { /* A file may keep nothing. */ }

  const help = () => {
    const keys = [["1 to 9", "the pages, from the left"], ["/", "filter"], ["arrows, j, k", "walk a table"], ["Enter", "open a job"], ["Esc", "back"], ["t", "light or dark"], ["?", "these keys"]];
    const dialog = sw.h("dialog", { class: "keys", onclose: () => dialog.remove() }, sw.h("h2", {}, "Keys"),
      sw.h("dl", { class: "facts" }, keys.map(([key, what]) => [sw.h("dt", {}, key), sw.h("dd", {}, what)]).flat()),
      sw.h("div", { class: "actions" }, sw.h("button", { type: "button", onclick: () => dialog.close() }, "close")));
    document.body.append(dialog);
    dialog.showModal();
  };

  const go = () => {
    page?.leave?.();
    const words = location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
    const tab = tabs.find(([path]) => path === words[0]) ?? tabs[0];
    page = words[0] === "jobs" && words[1] ? sw.pages.job(words[1]) : sw.pages[tab[2]]();
    sw.page = page;
    place.replaceChildren(page.element);
    for (const link of nav.children) {
      if (link.getAttribute("href") === `#/${tab[0]}`) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    page.update();
    page.table?.focus();
    scrollTo(0, 0);
  };

  const said = { live: "live", lost: "connection lost, trying again", connecting: "connecting", file: "" };
  const update = () => {
    const connection = sw.data.connection();
    status.textContent = said[connection];
    status.className = `status ${connection}`;
    name.textContent = sw.data.meta.name || sw.report?.name || "";
    page?.update();
  };

  addEventListener("hashchange", go);
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);
    if (event.key === "Escape") {
      if (typing) {
        event.target.value = "";
        event.target.dispatchEvent(new Event("input"));
        event.target.blur();
      } else if (location.hash.split("/").length > 2) history.back();
    } else if (!typing && event.key === "/") {
      const box = place.querySelector("input.filter");
      box?.focus();
      if (box) event.preventDefault();
    } else if (!typing && event.key === "t") turnTheme();
    else if (!typing && event.key === "?") help();
    else if (!typing && /^[1-9]$/.test(event.key) && tabs[event.key - 1]) location.hash = `#/${tabs[event.key - 1][0]}`;
  });
  sw.data.listen(update);
  // Ages grow though nothing changes.
  if (live) setInterval(update, 1000);
  go();
  update();
};

sw.main();
