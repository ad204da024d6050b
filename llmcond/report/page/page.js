(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  const SVG = "http://www.w3.org/2000/svg";
  const LOOKS = { A: ["var(--series-1)", "circle"], B: ["var(--series-2)", "square"] };

  // Texts become text nodes and nothing else, whatever they hold.
  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
      else if (value !== null && value !== undefined) element.setAttribute(key, value);
    }
    element.append(...children);
    return element;
  }

  function swatch(letter) {
    const svg = document.createElementNS(SVG, "svg");
    const use = document.createElementNS(SVG, "use");
    svg.setAttribute("class", "swatch");
    svg.setAttribute("viewBox", "-8 -8 16 16");
    svg.setAttribute("aria-hidden", "true");
    svg.style.color = LOOKS[letter][0];
    use.setAttribute("href", `#mark-${LOOKS[letter][1]}`);
    svg.append(use);
    return svg;
  }

  function passage(text) {
    const shown = make("span", { class: "text", dir: "auto" }, text);
    if (text.length <= 220 && text.split("\n").length <= 4) return shown;
    shown.classList.add("clamped");
    const button = make("button", { type: "button", class: "more", "aria-expanded": "false" }, "Show all");
    button.addEventListener("click", () => {
      const clamped = shown.classList.toggle("clamped");
      button.textContent = clamped ? "Show all" : "Show less";
      button.setAttribute("aria-expanded", String(!clamped));
    });
    return make("div", {}, shown, button);
  }

  function number(value, digits, signed = false) {
    if (value === null || value === undefined) return "–";
    const text = Math.abs(value).toFixed(digits);
    if (Number(text) === 0) return text;
    return (value < 0 ? "\u2212" : signed ? "+" : "") + text;
  }

  const trimmed = (value, digits) => (value === null ? "–" : String(Number(value.toFixed(digits))));
  const counted = (n, [one, several]) => `${n.toLocaleString("en")} ${n === 1 ? one : several}`;
  const UNIT = data.ranked ? ["query", "queries"] : ["row", "rows"];

  // -- tables that are wider than the screen -----------------------------------------------------

  // Nothing else on a phone shows that there are further columns.
  const sizes = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const box = target.closest(".scroll");
      box.classList.toggle("wide", box.scrollWidth > box.clientWidth);
    }
  });
  function watched(box) {
    sizes.observe(box);
    sizes.observe(box.firstElementChild);
    return box;
  }
  document.querySelectorAll(".scroll").forEach(watched);

  // -- sorting ----------------------------------------------------------------------------------

  // What is unknown comes last in either direction.
  function compare(a, b, direction) {
    const unknown = (value) => value === null || value === undefined || value === "";
    if (unknown(a) || unknown(b)) return unknown(a) - unknown(b);
    const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
    return direction === "ascending" ? order : -order;
  }

  // Figures are sorted with the greatest first, texts as in a dictionary; then reversed.
  function turned(heading) {
    const now = heading.getAttribute("aria-sort");
    const first = heading.classList.contains("number") ? "descending" : "ascending";
    const second = first === "ascending" ? "descending" : "ascending";
    return now === first ? second : first;
  }

  function mark(heading, direction) {
    for (const other of heading.parentNode.children) other.setAttribute("aria-sort", "none");
    heading.setAttribute("aria-sort", direction);
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    const headings = [...table.tHead.rows[0].cells];
    headings.forEach((heading, column) => {
      heading.firstElementChild.addEventListener("click", () => {
        const direction = turned(heading);
        const value = (row) => {
          const sort = row.cells[column].dataset.sort;
          return sort === undefined ? null : heading.classList.contains("number") ? Number(sort) : sort;
        };
        mark(heading, direction);
        const body = table.tBodies[0];
        body.append(...[...body.rows].sort((a, b) => compare(value(a), value(b), direction)));
      });
    });
  }

  // A table of many rows: sorted as a whole, shown a part at a time.
  function bigTable(label, columns, size = 25) {
    let rows = [];
    let shown = size;
    let sorted = null;
    const body = make("tbody");
    const more = make("button", { type: "button", class: "further", onclick: () => { shown += 4 * size; fill(); } });
    const head = make("tr");
    columns.forEach((column, i) => {
      const heading = make("th", { scope: "col", "aria-sort": "none", class: column.text ? null : "number" });
      heading.append(make("button", { type: "button", title: column.hint, onclick: () => sort(i, turned(heading)) }, column.label));
      head.append(heading);
    });
    function sort(i, direction) {
      sorted = [i, direction];
      mark(head.cells[i], direction);
      fill();
    }
    function fill() {
      const ordered = sorted ? [...rows].sort((a, b) => compare(columns[sorted[0]].value(a), columns[sorted[0]].value(b), sorted[1])) : rows;
      body.replaceChildren(...ordered.slice(0, shown).map((row) => make("tr", {}, ...columns.map((column) => {
        const content = column.show ? column.show(row) : column.value(row) ?? "–";
        return make("td", { class: column.text === true ? "text" : column.text ? null : "number" }, content);
      }))));
      more.hidden = ordered.length <= shown;
      more.textContent = `Show more of the ${ordered.length.toLocaleString("en")} rows`;
    }
    const table = make("table", {}, make("thead", {}, head), body);
    const box = make("div", { class: "scroll", role: "region", "aria-label": label, tabindex: "0" }, table);
    return {
      element: make("div", {}, watched(box), more),
      head,
      sort,
      set(found) { rows = found; shown = size; fill(); },
    };
  }

  // -- charts -----------------------------------------------------------------------------------

  const views = new Map();
  const tip = at("tooltip");

  function tooltip(_, event, __, value) {
    if (!value || typeof value !== "object") { tip.hidden = true; return; }
    if ("row" in value) tip.replaceChildren(...rowTip(Number(value.row)));
    else tip.replaceChildren(...Object.entries(value).map(([key, said]) => make("p", {}, make("b", {}, key), ` ${said}`)));
    tip.hidden = false;
    const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
    tip.style.left = `${Math.max(8, Math.min(event.clientX + 14, room)) + scrollX}px`;
    const below = event.clientY + 16 + tip.offsetHeight < innerHeight;
    tip.style.top = `${event.clientY + scrollY + (below ? 16 : -tip.offsetHeight - 12)}px`;
  }

  function rowTip(i) {
    const short = (text) => make("p", { class: "clamped", dir: "auto" }, text);
    const condition = make("p", { dir: "auto" }, make("b", {}, text("condition", i)));
    const rating = make("p", {}, `row ${data.rows.number[i]}, rating ${trimmed(data.rows.rating[i], 3)}`);
    return [condition, short(text("sentence1", i)), short(text("sentence2", i)), rating];
  }

  function draw(key, chart, datasets = {}) {
    const target = document.querySelector(`[data-chart="${key}"]`);
    if (!target || !data.charts[chart]) return;
    const spec = structuredClone(data.charts[chart]);
    spec.datasets = { ...spec.datasets, ...datasets };
    const options = { mode: "vega-lite", renderer: "svg", actions: false, ast: true, defaultStyle: false, logLevel: 1, tooltip, config: data.config };
    const turn = (views.get(key)?.turn ?? 0) + 1;
    views.get(key)?.view?.finalize();
    views.set(key, { turn });
    window.vegaEmbed(target, spec, options).then((result) => {
      if (views.get(key).turn === turn) views.get(key).view = result.view;
      else result.view.finalize();
    });
  }

  // Numbers beneath a chart are made when they are looked at.
  const numbers = new Map();
  function tabulate(key, label, rows, columns, size) {
    numbers.set(key, () => {
      const table = bigTable(label, columns, size);
      table.set(rows());
      return table.element;
    });
  }
  for (const box of document.querySelectorAll("[data-numbers]")) {
    box.addEventListener("toggle", () => { if (box.open) refresh(box.dataset.numbers); });
  }
  function refresh(key) {
    const box = document.querySelector(`[data-numbers="${key}"]`);
    if (box?.open) box.querySelector(".fill").replaceChildren(numbers.get(key)());
  }

  if (data.charts.heads) {
    draw("heads", "heads");
    const rows = Object.values(data.charts.heads.datasets).find((set) => set[0] && "system" in set[0]);
    tabulate("heads", `${data.primary} by head and template`, () => rows, [
      { label: "system", text: true, value: (row) => row.system },
      { label: data.primary, value: (row) => row.value, show: (row) => row[data.primary] },
      { label: "from", value: (row) => row.low, show: (row) => number(row.low, 1) },
      { label: "to", value: (row) => row.high, show: (row) => number(row.high, 1) },
    ], 100);
  }
  for (const key of Object.keys(data.charts)) if (key.startsWith("isotropy-")) draw(key, key);

  // -- rows -------------------------------------------------------------------------------------

  const text = (key, i) => data.texts[data.rows[key][i]];
  const entry = (i, place) => passage(text(data.columns[place][0], i));

  if (data.systems.length) {
    const letters = data.chosen[1] === null ? ["A"] : ["A", "B"];
    const index = new Map(data.systems.map((system, i) => [system.name, i]));
    const state = Object.fromEntries(letters.map((letter, i) => [letter, index.get(data.chosen[i])]));
    const system = (letter) => data.systems[state[letter]];
    const everyRow = data.rows.number.map((_, i) => i);
    const [low, high] = data.scale ?? [0, 1];
    const rating = (i) => (data.ranked ? null : data.rows.rating[i]);
    const distinct = [...new Set((data.rows.rating ?? []).filter((r) => r !== null))].sort((a, b) => a - b);
    const gap = Math.min(...distinct.slice(1).map((r, i) => r - distinct[i]), high - low);
    // The same for a row in every picture.
    const spread = (i) => (distinct.length > 21 ? 0 : (((i * 2654435761) >>> 0) / 2 ** 32 - 0.5) * 0.6 * gap);

    const textColumns = data.columns.map(
      ([key, label], place) => ({ label, text: true, value: (i) => text(key, i), show: (i) => entry(i, place) }));
    const said = (letter, i, digits) => (data.ranked ? trimmed(system(letter).rank[i], 2) : number(system(letter).similarity[i], digits));
    const predicted = (letter, i) => (data.ranked ? system(letter).rank : system(letter).similarity)[i];

    tabulate("scatter", `Predictions of each ${UNIT[0]}`, () => everyRow, [
      { label: UNIT[0], value: (i) => data.rows.number[i] },
      ...(data.ranked ? [] : [{ label: "rating", value: rating, show: (i) => trimmed(rating(i), 3) }]),
      ...letters.map((letter) => ({ label: letter, value: (i) => predicted(letter, i), show: (i) => said(letter, i, 4) })),
      ...textColumns,
    ]);
    const levels = () => letters.flatMap((letter, place) => system(letter).levels.map(([rating, n, mean, q1, median, q3]) => (
      { series: letter, name: system(letter).name, rating, place: rating + (letters.length > 1 ? (place - 0.5) * 0.12 * gap : 0), n, mean, low: q1, median, high: q3 })));
    tabulate("levels", "Predictions by rating", levels, [
      { label: "system", text: true, value: (level) => level.name },
      { label: "rating", value: (level) => level.rating },
      { label: "rows", value: (level) => level.n },
      ...[["mean", "mean"], ["low", "lower quartile"], ["median", "median"], ["high", "upper quartile"]].map(
        ([key, label]) => ({ label, value: (level) => level[key], show: (level) => number(level[key], 3) })),
    ], 100);

    const hits = () => letters.flatMap((letter) => system(letter).hits.map(([k, share]) => ({ series: letter, name: system(letter).name, k, share })));
    tabulate("hits", "Answers by rank", hits, [
      { label: "system", text: true, value: (point) => point.name },
      { label: "among the first", value: (point) => point.k },
      { label: "answers in %", value: (point) => point.share, show: (point) => number(100 * point.share, 1) },
    ], 100);

    const updates = [];

    function ranks() {
      draw("hits", "hits", { points: hits() });
      refresh("hits");
      refresh("scatter");
    }

    function charts() {
      const all = levels();
      for (const letter of letters) {
        at(`scatter-name-${letter}`).replaceChildren(...(letters.length > 1 ? [swatch(letter), `${letter}: ${system(letter).name}`] : [system(letter).name]));
        const points = everyRow.filter((i) => data.rows.rating[i] !== null && system(letter).similarity[i] !== null)
          .map((i) => ({ x: data.rows.rating[i] + spread(i), y: system(letter).similarity[i], row: i }));
        draw(`scatter-${letter}`, "scatter", { points, levels: all.filter((level) => level.series === letter) });
      }
      draw("levels", "levels", { levels: all, ends: [{ rating: low, value: 0 }, { rating: high, value: 1 }] });
      refresh("scatter");
      refresh("levels");
    }
    if (data.ranked) updates.push(ranks);
    else if (data.conditions) updates.push(charts);
    if (data.conditions) updates.push(conditions());
    if (letters.length > 1) updates.push(disagreements());

    function update() {
      for (const letter of letters) at(`score-${letter}`).textContent = system(letter).score;
      for (const one of updates) one();
    }
    for (const letter of letters) {
      const select = at(`system-${letter}`);
      select.append(...data.systems.map((one, i) => make("option", { value: i }, one.name)));
      select.value = state[letter];
      select.addEventListener("change", () => { state[letter] = Number(select.value); update(); });
    }
    update();

    function search(label) {
      const input = make("input", { type: "search", autocomplete: "off" });
      return [make("label", {}, label, input), input];
    }

    function conditions() {
      const found = data.conditions;
      const share = (value) => (value === null ? null : value / 10);
      const digits = found.decimals ?? 1;
      const error = (letter) => (i) => (data.ranked ? found.figure[state[letter]][i] : share(found.error[state[letter]][i]));
      const difference = (i) => {
        const [a, b] = [error("A")(i), error("B")(i)];
        return a === null || b === null ? null : a - b;
      };
      const columns = [
        { label: found.what[0], text: true, value: (i) => data.texts[found.text[i]], show: (i) => passage(data.texts[found.text[i]]) },
        { label: UNIT[1], value: (i) => found.n[i] },
        ...(data.ranked ? [] : [
          { label: "mean rating", value: (i) => found.rating[i], show: (i) => number(found.rating[i], 2) },
          { label: "by chance", value: (i) => share(found.chance[i]), show: (i) => number(share(found.chance[i]), 1) },
        ]),
        ...letters.map((letter) => ({ label: letters.length > 1 ? letter : data.ranked ? data.primary : "out of place", value: error(letter), show: (i) => number(error(letter)(i), digits) })),
      ];
      const hint = data.ranked ? `${found.better} 0: A ranks answers higher` : "below 0: A is nearer to the ratings";
      if (letters.length > 1) columns.push({ label: "A minus B", hint, value: difference, show: (i) => number(difference(i), digits, true) });
      const table = bigTable(data.ranked ? `${data.primary} by ${found.what[0]}` : "Rank errors by condition", columns, 15);
      const [label, input] = search(`Search ${found.what[1]}`);
      const least = make("select", {}, ...[1, 2, 3, 5, 10, 20].map((n) => make("option", { value: n }, String(n))));
      const many = found.n.filter((n) => n >= 3).length;
      least.value = many >= 5 ? 3 : 1;
      const count = make("p", { role: "status" });
      function fill() {
        const wanted = input.value.trim().toLowerCase();
        const kept = found.n.map((_, i) => i).filter((i) => found.n[i] >= Number(least.value) && data.texts[found.text[i]].toLowerCase().includes(wanted));
        count.textContent = `${kept.length.toLocaleString("en")} of ${counted(found.n.length, found.what)}`;
        table.set(kept);
      }
      input.addEventListener("input", fill);
      least.addEventListener("change", fill);
      at("conditions").append(make("div", { class: "tools" }, label, make("label", {}, data.ranked ? "Queries, at least" : "Rows, at least", least), count), table.element);
      table.sort(1, "descending");
      return fill;
    }

    function disagreements() {
      const SIZE = 6;
      const [label, input] = search("Search texts");
      const nearer = make("select", {}, ...[["", "any"], ["A", "A"], ["B", "B"]].map(([value, said]) => make("option", { value }, said)));
      const count = make("p", { role: "status" });
      const list = make("ul", { class: "cards" });
      let shown = SIZE;
      const more = make("button", { type: "button", class: "further", onclick: () => { shown += 2 * SIZE; fill(); } }, "Show more");
      const band = new Map((data.spans ?? []).map(([rating, first, last]) => [rating, [first, last]]));

      const closer = (i) => {
        const [a, b] = ["A", "B"].map((letter) => (data.ranked ? system(letter).rank : system(letter).error)[i]);
        if (a === null || b === null || Math.abs(a) === Math.abs(b)) return "";
        return Math.abs(a) < Math.abs(b) ? "A" : "B";
      };
      function matches(i, wanted) {
        if (nearer.value && closer(i) !== nearer.value) return false;
        return !wanted || data.columns.some(([key]) => text(key, i).toLowerCase().includes(wanted));
      }
      function strip(i) {
        const box = make("div", { class: "strip", "aria-hidden": "true" });
        const span = band.get(rating(i));
        if (span) {
          const [first, last] = span;
          const part = make("div", { class: "band" });
          part.style.left = `${first / 10}%`;
          part.style.width = `${(last - first) / 10}%`;
          box.append(part);
        }
        for (const letter of ["B", "A"]) {
          const sign = swatch(letter);
          sign.style.left = `${system(letter).place[i] / 10}%`;
          box.append(sign);
        }
        return box;
      }
      function figures(i) {
        const one = (name, said) => make("div", {}, make("dt", {}, ...name), make("dd", {}, said));
        const place = (letter) => (data.ranked ? `rank ${said(letter, i)}` : `${said(letter, i, 3)}, at ${Math.round(system(letter).place[i] / 10)} %`);
        const first = data.ranked ? [] : [one(["rating"], trimmed(rating(i), 3))];
        return make("dl", { class: "figures" }, ...first, ...letters.map((letter) => one([swatch(letter), letter], place(letter))));
      }
      function card(i) {
        const near = closer(i);
        const row = make("span", { class: "detail" }, `${UNIT[0]} ${data.rows.number[i]}`);
        const verdict = data.ranked ? (near ? `${near} ranks the answer higher` : "both rank the answer alike")
          : near ? `${near} is nearer to the rating` : rating(i) === null ? "unrated" : "both are as near to the rating";
        const condition = make("div", { class: "condition" }, entry(i, 0));
        // What a text is would else have to be guessed.
        const texts = data.columns.slice(1).map(([key, label], place) => ({ label, place: place + 1, there: text(key, i) })).filter((one) => one.there)
          .map((one) => make("div", {}, ...(data.ranked ? [make("span", { class: "detail" }, one.label)] : []), entry(i, one.place)));
        return make("li", { class: "card" },
          make("header", {}, condition, row),
          make("div", { class: "texts" }, ...texts),
          strip(i), figures(i), make("span", { class: "detail" }, verdict));
      }
      function fill() {
        const wanted = input.value.trim().toLowerCase();
        const apart = (i) => Math.abs(system("A").place[i] - system("B").place[i]);
        const there = everyRow.filter((i) => system("A").place[i] !== null && system("B").place[i] !== null && matches(i, wanted));
        there.sort((a, b) => apart(b) - apart(a) || a - b);
        count.textContent = counted(there.length, UNIT);
        list.replaceChildren(...there.slice(0, shown).map(card));
        more.hidden = there.length <= shown;
      }
      const again = () => { shown = SIZE; fill(); };
      input.addEventListener("input", again);
      nearer.addEventListener("change", again);
      at("disagreements").append(make("div", { class: "tools" }, label, make("label", {}, data.ranked ? "Ranks the answer higher" : "Nearer to the rating", nearer), count), list, more);
      return again;
    }
  }

  // -- learning curves --------------------------------------------------------------------------

  if (data.curves.length) {
    const select = at("system-curves");
    select.append(...data.curves.map((one, i) => make("option", { value: i }, one.name)));
    const best = data.curves.findIndex((one) => one.name === data.chosen[0]);
    select.value = Math.max(best, 0);
    const mean = (values) => (values.includes(null) ? null : values.reduce((a, b) => a + b, 0) / values.length);
    // As far as every seed went.
    const means = data.curves.map((one) => {
      const length = Math.min(...one.seeds.map((seed) => seed.length));
      return Array.from({ length }, (_, epoch) => ({
        name: one.name,
        epoch: one.seeds[0][epoch][0],
        dev: mean(one.seeds.map((seed) => seed[epoch][2])),
      })).filter((point) => point.dev !== null);
    });
    const points = (i) => data.curves[i].seeds.flatMap((seed, s) => seed.map(([epoch, loss, dev]) => ({ name: data.curves[i].name, seed: data.curves[i].labels[s], epoch, loss, dev })));
    tabulate("curves", "Learning curves", () => points(Number(select.value)), [
      { label: "system", text: true, value: (row) => row.name },
      { label: "seed", value: (row) => row.seed },
      { label: "epoch", value: (row) => row.epoch },
      { label: "loss", value: (row) => row.loss, show: (row) => number(row.loss, 4) },
      { label: data.dev, value: (row) => row.dev, show: (row) => number(row.dev, 1) },
    ], 50);
    function update() {
      const i = Number(select.value);
      draw("dev", "dev", { chosen: points(i).filter((row) => row.dev !== null), others: means.filter((_, j) => j !== i).flat() });
      // Losses of other systems are of other kinds, and not to be compared.
      draw("loss", "loss", { chosen: points(i).filter((row) => row.loss !== null), others: [] });
      refresh("curves");
    }
    select.addEventListener("change", update);
    update();
  }
})();
