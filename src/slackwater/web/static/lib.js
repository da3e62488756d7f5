"use strict";
/* Elements, figures and times, as every part of the page writes them. Nothing here is markup: text
   that comes from jobs is set as text. */

const sw = {};

/** Make an element. Attributes that begin with "on" are listeners; null children are left out. */
sw.h = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) element.append(child);
  }
  return element;
};

sw.NOTHING = "–";

sw.known = (value) => value !== null && value !== undefined;

sw.count = (value) => (sw.known(value) ? Math.round(value).toLocaleString("en-US") : sw.NOTHING);

/** Show a number with three digits or so. */
sw.figure = (value) => {
  if (!sw.known(value)) return sw.NOTHING;
  const size = Math.abs(value);
  if (size >= 100 || value === 0) return sw.count(value);
  return value.toFixed(size >= 10 ? 1 : 2);
};

sw.percent = (value, digits = 0) => (sw.known(value) ? `${(100 * value).toFixed(digits)} %` : sw.NOTHING);

sw.bytes = (value) => {
  if (!sw.known(value)) return sw.NOTHING;
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  let left = value;
  while (Math.abs(left) >= 1024 && unit < units.length - 1) {
    left /= 1024;
    unit += 1;
  }
  return `${unit && left < 100 ? left.toFixed(1) : Math.round(left)} ${units[unit]}`;
};

/** Show a duration in two units at most, as the command line does: 12s, 3m5s, 2h40m, 4d. */
sw.duration = (seconds) => {
  if (!sw.known(seconds)) return sw.NOTHING;
  const whole = Math.max(0, Math.floor(seconds));
  for (const [size, unit, next, smaller] of [
    [86400, "d", 3600, "h"],
    [3600, "h", 60, "m"],
    [60, "m", 1, "s"],
  ]) {
    if (whole >= size) {
      const number = Math.floor(whole / size);
      const part = Math.floor((whole % size) / next);
      return `${number}${unit}` + (part && number < 10 ? `${part}${smaller}` : "");
    }
  }
  return seconds > 0 && seconds < 10 && seconds !== whole ? `${seconds.toFixed(1)}s` : `${whole}s`;
};

sw.speed = (iterationsPerS) => {
  if (!iterationsPerS) return sw.NOTHING;
  if (iterationsPerS < 1 / 3600) return "0 it/min";
  if (iterationsPerS < 0.1) return `${(iterationsPerS * 60).toPrecision(2)} it/min`;
  return `${iterationsPerS < 100 ? iterationsPerS.toFixed(1) : sw.count(iterationsPerS)} it/s`;
};

/** Show when something was: the time of the day, and the date unless it is today's. */
sw.clock = (atS) => {
  if (!atS && atS !== 0) return sw.NOTHING;
  if (sw.data.meta.relative) return sw.duration(atS);
  const at = new Date(atS * 1000);
  const time = at.toLocaleTimeString("en-GB");
  const today = new Date(sw.data.nowS() * 1000).toDateString() === at.toDateString();
  return today ? time : `${at.toLocaleDateString("en-CA")} ${time}`;
};

sw.ago = (atS) => (atS ? `${sw.duration(sw.data.nowS() - atS)} ago` : sw.NOTHING);

sw.number = (count, noun) => `${sw.count(count)} ${noun}${count === 1 ? "" : "s"}`;

/** Compare texts with numbers as people do: a2 before a10. */
sw.natural = new Intl.Collator("en", { numeric: true, sensitivity: "base" }).compare;

/** Show a state as a chip of its color. */
sw.state = (state) => sw.h("span", { class: `chip state-${state.replaceAll(" ", "-")}` }, state);

/** Read a color of the theme. */
sw.color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** Ask the server. Throws an Error with its reason. */
sw.ask = async (path, options = {}) => {
  let response;
  try {
    response = await fetch(path, { credentials: "same-origin", ...options });
  } catch (error) {
    throw new Error("the dashboard's server does not answer");
  }
  const body = await response.json().catch(() => ({}));
  if (!response.ok) {
    const error = new Error(body.error || `HTTP ${response.status}`);
    error.status = response.status;
    throw error;
  }
  return body;
};
