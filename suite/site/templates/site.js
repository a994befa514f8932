"use strict";
// Data come as scripts that call SITE.take, since a page opened as a file may load scripts only.
// Whatever a run holds becomes text of the page, never markup.
const SITE = (() => {
  const root = document.body.dataset.root;
  const waiting = new Map();
  const loaded = new Map();

  const take = (name, value) => waiting.get(name)?.(value);

  const load = (name) => {
    if (!loaded.has(name)) {
      loaded.set(name, new Promise((resolve, reject) => {
        waiting.set(name, resolve);
        const script = document.createElement("script");
        script.src = `${root}data/${name}.js`;
        // Rejecting does nothing where the file called take; a file that is cut off does not.
        script.onload = script.onerror = (event) => {
          if (event.type === "error") loaded.delete(name);
          reject(new Error(`The file data/${name}.js could not be loaded: copy the whole site.`));
        };
        document.head.append(script);
      }));
    }
    return loaded.get(name);
  };

  const make = (tag, attributes = {}, ...content) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...content.filter((part) => part !== "" && part !== null));
    return element;
  };

  const chip = (verdict, look) => {
    const sign = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    sign.setAttribute("class", "m");
    sign.setAttribute("aria-hidden", "true");
    const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
    use.setAttribute("href", `#m-${look}`);
    sign.append(use);
    return make("span", { class: `v v-${look}` }, sign, verdict);
  };

  const table = (label, classes, heads, rows) => {
    const head = make("tr", {}, ...heads.map((text) => make("th", { scope: "col" }, text)));
    const body = make("tbody", {}, ...rows);
    const whole = make("table", { class: classes }, make("caption", {}, label), make("thead", {}, head), body);
    return make("div", { class: "box", tabindex: "0", role: "region", "aria-label": label }, whole);
  };

  // The state of a page is its address: what follows #, or what a form without scripts sent.
  const asked = () => new URLSearchParams(location.hash ? location.hash.slice(1) : location.search);

  const caseLink = (id) => `${root}case.html#id=${encodeURIComponent(id)}`;

  // All cases of the index, with the verdict of each run ("": the run does not have it).
  const cases = (index) => {
    const words = (letter) => letter === "-" ? "" : letter === "." ? "left out" : index.verdicts[parseInt(letter, 36)][0];
    return index.groups.flatMap(([system, backend, group, heads, about, told]) =>
      heads.map((head, at) => {
        const id = head.replace("\t", () => `::${system}`);
        return { id, system, backend, group, at, about: about[at], told, text: id.toLowerCase(), verdicts: told.map((letters) => words(letters[at])) };
      }));
  };

  const looks = (index) => new Map([...index.verdicts, ["left out", "none"]]);

  const say = (text) => { document.getElementById("told").textContent = text; };

  return { take, load, make, chip, table, asked, caseLink, cases, looks, say };
})();

for (const note of document.querySelectorAll(".scriptless")) note.remove();

// The list of cases: filters, address and table say the same.
(async () => {
  const form = document.getElementById("filter");
  if (!form) return;
  const { load, make, chip, table, asked, caseLink, say } = SITE;
  const PAGE = 200;
  let index;
  try { index = await load("index"); } catch (error) { say(error.message); return; }
  const all = SITE.cases(index);
  const looks = SITE.looks(index);
  const names = index.capabilities.map(([name]) => name);
  const fill = (name, values) => form.elements[name].append(...values.map((value) => make("option", { value }, value)));
  fill("system", [...new Set(index.groups.map((group) => group[0]))]);
  fill("backend", [...new Set(index.groups.map((group) => group[1]))].sort());
  fill("capability", names.filter((_, at) => all.some((one) => one.about.includes(at.toString(36)))));
  const more = document.getElementById("more");
  let shown = PAGE;

  const matching = () => {
    const given = Object.fromEntries(new FormData(form));
    const words = given.q.toLowerCase().split(/\s+/).filter(Boolean);
    const letter = given.capability && names.indexOf(given.capability).toString(36);
    const run = index.runs.findIndex((one) => one.slug === given.run);
    return all.filter((one) => {
      const told = run < 0 ? one.verdicts : [one.verdicts[run]];
      return (!given.system || one.system === given.system) && (!given.backend || one.backend === given.backend) &&
        (!letter || one.about.includes(letter)) && (run < 0 || told[0] !== "") &&
        (!given.verdict || told.includes(given.verdict)) && words.every((word) => one.text.includes(word));
    });
  };

  const show = () => {
    const found = matching();
    const chosen = form.elements.run.value;
    const runs = index.runs.map((run, at) => ({ ...run, at })).filter((run) => !chosen || run.slug === chosen);
    const rows = found.slice(0, shown).map((one) => make("tr", {},
      make("th", { scope: "row" }, make("a", { href: caseLink(one.id) }, one.id)),
      ...runs.map((run) => {
        const verdict = one.verdicts[run.at];
        return make("td", {}, verdict ? chip(verdict, looks.get(verdict)) : "-");
      })));
    const label = "Cases and their verdicts on each machine";
    document.getElementById("list").replaceChildren(rows.length ? table(label, "list", ["case", ...runs.map((run) => run.name)], rows) : "");
    more.hidden = found.length <= shown;
    say(`${found.length.toLocaleString("en")} of ${all.length.toLocaleString("en")} cases${found.length > shown ? `, the first ${shown} are shown` : ""}`);
  };

  const read = () => {
    const given = asked();
    for (const field of form.elements) {
      if (!field.name) continue;
      const value = given.get(field.name) ?? "";
      // A link may name what this site has not: it then finds nothing, rather than everything.
      if (field.tagName === "SELECT" && value && ![...field.options].some((one) => one.value === value)) fill(field.name, [value]);
      field.value = value;
    }
    shown = PAGE;
    show();
  };

  let timer = 0;
  const changed = () => {
    const given = [...new FormData(form)].filter(([, value]) => value);
    const hash = `#${new URLSearchParams(given)}`;
    if (location.hash !== hash) location.replace(hash);
    else show();
  };
  form.addEventListener("submit", (event) => { event.preventDefault(); changed(); });
  form.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(changed, 120); });
  addEventListener("hashchange", read);
  more.addEventListener("click", () => {
    const next = shown;
    shown += PAGE;
    show();
    document.querySelectorAll("#list tbody a")[next]?.focus();
  });
  read();
})();

// One case: its verdict on each machine, figures side by side, and the evidence of each run.
(async () => {
  const place = document.getElementById("case");
  if (!place) return;
  const { load, make, chip, table, asked, say } = SITE;
  let index;
  try { index = await load("index"); } catch (error) { say(error.message); return; }
  const all = SITE.cases(index);
  const looks = SITE.looks(index);

  const evidence = async (one, run) => {
    const before = [...one.told[run].slice(0, one.at)].filter((letter) => letter !== "-" && letter !== ".").length;
    const part = Math.floor(before / index.part);
    const rows = await load(`${index.runs[run].slug}/${one.group}-${part}`);
    return rows[before % index.part];
  };

  const block = (run, told) => {
    const facts = [["error / bound", told.error], ["bytes sent", told.bytes], ["seconds", String(told.seconds)], ["scenario", told.source], ...told.facts];
    const listed = make("dl", { class: "facts" }, ...facts.filter(([, value]) => value && value !== "-" && value !== "0").flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, String(value))]));
    const checks = told.checks.map(([name, status, message]) => make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, chip(status, looks.get(status) ?? "none")), make("td", { class: "wide" }, message)));
    const parts = [make("h2", {}, run.name), make("p", { class: "soft" }, `${run.label}; ${run.taken}`), make("p", {}, chip(told.verdict, looks.get(told.verdict.split("(")[0].trim()) ?? looks.get(told.verdict) ?? "none"))];
    if (told.reason) parts.push(make("pre", {}, told.reason));
    parts.push(listed);
    if (checks.length) parts.push(table(`Checks in run ${run.name}`, "fits", ["check", "status", "what it says"], checks));
    if (told.rerun) parts.push(make("p", { class: "label" }, "run it again"), make("pre", { class: "rerun" }, make("code", {}, told.rerun)));
    return make("section", { class: "evidence", "aria-label": `Evidence of run ${run.name}` }, ...parts);
  };

  // Lists and mappings of more characters are folded.
  const LONG = 240;

  // Figures of all runs side by side: exact ones have tolerance 0, so any difference shows.
  const figures = (runs, found) => {
    const rows = new Map();
    found.forEach((told, at) => {
      for (const [check, , , values] of told.checks) for (const [name, value] of values) {
        const key = `${check}.${name}`;
        if (!rows.has(key)) rows.set(key, runs.map(() => null));
        rows.get(key)[at] = value;
      }
    });
    const made = [...rows].sort().map(([name, values]) => make("tr", {}, make("th", { scope: "row" }, name), ...values.map((value) => {
      const known = values.filter((other) => other !== null);
      const differs = value !== null && value !== known[0];
      const long = value !== null && value.length > LONG;
      const shown = long ? make("details", {}, make("summary", {}, `${value.slice(0, 60)} ...`), value) : value ?? "-";
      return make("td", { class: differs ? "figure differs" : "figure" }, shown);
    })));
    return table("Figures of checks", "fits", ["figure", ...runs.map((run) => run.name)], made);
  };

  const show = async () => {
    const id = asked().get("id") ?? "";
    const one = all.find((other) => other.id === id);
    place.replaceChildren();
    if (!one) {
      say(id ? `This site has no case ${id}.` : "The address names no case.");
      place.append(make("p", {}, make("a", { href: "cases.html" }, "Search the cases")));
      return;
    }
    document.querySelector("h1").textContent = id;
    document.title = `${id}, ${document.title.split(", ").pop()}`;
    const at = one.verdicts.map((verdict, run) => (verdict && verdict !== "left out" ? run : -1)).filter((run) => run >= 0);
    const runs = at.map((run) => index.runs[run]);
    const about = [...one.about].map((letter) => index.capabilities[parseInt(letter, 36)][0]);
    try {
      const found = await Promise.all(at.map((run) => evidence(one, run)));
      if (asked().get("id") !== id) return;
      const summary = index.runs.map((run, number) => {
        const told = found[at.indexOf(number)];
        const verdict = one.verdicts[number];
        return make("tr", {}, make("th", { scope: "row" }, make("a", { href: `runs/${run.slug}.html` }, run.name)),
          make("td", {}, verdict ? chip(verdict, looks.get(verdict)) : "not in this run"), make("td", {}, told?.error ?? "-"), make("td", {}, told?.bytes ?? "-"), make("td", {}, run.label));
      });
      place.append(
        make("p", {}, make("a", { href: `cases.html#${new URLSearchParams({ system: one.system, backend: one.backend })}` }, `All cases of ${one.system} on ${one.backend}`), `. It says something about: ${about.join(", ")}.`),
        table("Verdict on each machine and version", "fits", ["run", "verdict", "error / bound", "bytes sent", "machine and version"], summary),
        ...runs.map((run, number) => block(run, found[number])).reverse(),
      );
      if (found.some((told) => told.checks.length)) place.append(make("h2", {}, "Figures"), make("p", {}, "A sign marks what differs from the first run that has the figure. Peaks, resident and control bytes may differ between machines."), figures(runs, found));
      say("");
      document.dispatchEvent(new Event("toggle"));
    } catch (error) { say(error.message); }
  };
  addEventListener("hashchange", show);
  await show();
})();

// A form that filters the rows of the table whose id it names.
for (const form of document.querySelectorAll("form[data-filters]")) {
  form.hidden = false;
  const rows = [...document.querySelectorAll(`#${form.dataset.filters} tbody tr`)];
  const texts = rows.map((row) => row.textContent.toLowerCase());
  const filter = () => {
    const words = form.querySelector("input").value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    rows.forEach((row, at) => {
      row.hidden = !words.every((word) => texts[at].includes(word));
      count += !row.hidden;
    });
    form.querySelector("[role=status]").textContent = words.length ? `${count} of ${rows.length}` : "";
  };
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
}

// Two runs are chosen, and their page is opened; #a=...&b=... chooses them by a link.
(() => {
  const form = document.getElementById("pair");
  if (!form) return;
  form.hidden = false;
  const go = () => {
    const { a, b } = Object.fromEntries(new FormData(form));
    const links = [...document.querySelectorAll("a[data-pair]")];
    const found = links.find((link) => [`${a} ${b}`, `${b} ${a}`].includes(link.dataset.pair));
    if (found) location.assign(found.href);
    else form.querySelector("[role=status]").textContent = a === b ? "Choose two runs." : "These two are not compared here.";
  };
  form.addEventListener("submit", (event) => { event.preventDefault(); go(); });
  const given = SITE.asked();
  if (given.get("a") && given.get("b")) {
    for (const name of ["a", "b"]) form.elements[name].value = given.get(name);
    go();
  }
})();

// The search of every page leads to the list of cases.
document.querySelector(".find-cases input")?.closest("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const words = event.target.elements.q.value;
  location.assign(`${document.body.dataset.root}cases.html#q=${encodeURIComponent(words)}`);
});
