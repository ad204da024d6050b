"use strict";
// All content is inserted as text, never as HTML.
{
  const element = (name, properties = {}, ...children) => {
    const node = Object.assign(document.createElement(name), properties);
    node.append(...children);
    return node;
  };
  const lines = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);
  // Commas separate values; double quotes surround a value with a comma, as in CSV.
  const values = (text) => [...text.matchAll(/\s*"((?:[^"]|"")*)"|[^,]+/g)]
    .map(([plain, quoted]) => (quoted?.replaceAll('""', '"') ?? plain).trim()).filter(Boolean);
  // Fields that are empty, or that the page lacks, are left out.
  const given = (name, items) => (items.length ? { [name]: items } : {});
  const ignored = (form) => given("ignore", lines(form.ignore ?? ""));
  const formatNumber = (value) => (value === null ? "–" : value.toFixed(3).replace("-", "\u2212"));

  // A table whose first column has texts, and whose other columns have figures.
  const table = (caption, headings, rows) => {
    const head = headings.map((text, i) => element("th", { scope: "col", className: i ? "number" : "" }, text));
    const body = rows.map(([text, ...cells]) =>
      element("tr", {}, element("th", { scope: "row" }, text),
        ...cells.map((cell) => element("td", { className: "number" }, cell))));
    const grid = element("table", {},
      element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body));
    // The scrolling region is focusable, so that it can be scrolled with the keyboard.
    return element("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: caption }, grid);
  };

  const cosine = (a, b) => {
    const dot = (x, y) => x.reduce((sum, value, i) => sum + value * y[i], 0);
    return dot(a, b) / (Math.sqrt(dot(a, a) * dot(b, b)) || 1);
  };

  // For each endpoint: the request body for the values of a form, and how a response is displayed.
  const endpoints = {
    "/v1/similarity": {
      body: (form) => {
        const examples = form.values.split("\n");
        const rows = form.conditions.split("\n").map((text, i) => [text.trim(), values(examples[i] ?? "")])
          .filter(([condition]) => condition);
        return {
          sentence1: form.sentence1, sentence2: form.sentence2, condition: rows.map(([condition]) => condition),
          ...(rows.some(([, list]) => list.length) ? { values: rows.map(([, list]) => list) } : {}),
          ...ignored(form),
        };
      },
      show: (answer, { condition }) =>
        table("Similarity under each condition", ["Condition", "Similarity"],
          answer.similarities.map((value, i) => {
            const bar = element("meter", { min: 0, max: 1, value: value ?? 0, ariaHidden: "true" });
            return [condition[i], element("span", {}, bar, formatNumber(value))];
          })),
    },
    "/v1/embeddings": {
      body: (form) => ({
        input: lines(form.texts), condition: form.condition, ...given("values", values(form.values)), ...ignored(form),
        encoding_format: "float",
      }),
      show: (answer, { input }) => {
        const vectors = answer.data.map((item) => item.embedding);
        const caption = "Cosine similarity between the texts, by their numbers";
        const grid = table(caption, ["Text", ...input.map((_, i) => `${i + 1}`)], vectors.map((vector, i) => [
          `${i + 1}. ${input[i]}`, ...vectors.map((other) => formatNumber(cosine(vector, other))),
        ]));
        return element("div", {}, element("p", {}, `${caption}.`), grid);
      },
    },
    "/v1/search": {
      body: (form) => ({
        query: form.query, condition: form.condition, ...given("values", values(form.values)), ...ignored(form), k: Number(form.k),
        ...(form.where.trim() ? { where: form.where } : {}),
      }),
      show: (answer) => !answer.results.length ? element("p", {}, "No text matches.") : element("ol", {}, ...answer.results.map(({ rank, score, text, ...others }) =>
        element("li", {},
          element("span", { className: "muted" }, `${rank}.`), " ",
          element("span", { className: "text" }, text),
          element("span", { className: "detail" },
            [["similarity", formatNumber(score)], ...Object.entries(others)]
              .filter(([, value]) => typeof value !== "object" && value !== "")
              .map(([name, value]) => `${name}: ${value}`).join(", "))))),
    },
  };

  const quoteForShell = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const curl = (path, body) => {
    const key = document.getElementById("key") ? ` \\\n  -H "Authorization: Bearer $KEY"` : "";
    return `curl ${location.origin}${path} -H 'Content-Type: application/json'${key} \\\n  -d ${quoteForShell(JSON.stringify(body))}`;
  };

  const post = async (path, body) => {
    const key = document.getElementById("key")?.value.trim();
    const response = await fetch(path, {
      method: "POST",
      headers: { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) },
      body: JSON.stringify(body),
    });
    const answer = await response.json();
    if (response.status === 401) throw new Error("the API key is missing or wrong. Enter it at the top of the page.");
    if (!response.ok) throw new Error(answer.error.message);
    return answer;
  };

  // The key's form is never submitted: it exists so that browsers recognise a password field.
  document.querySelector("form.key")?.addEventListener("submit", (event) => event.preventDefault());

  for (const form of document.querySelectorAll("form[data-path]")) {
    const { path } = form.dataset;
    const find = (selector) => form.parentElement.querySelector(selector);
    const [button, status, alert] = ["button", "[role=status]", "[role=alert]"].map(find);
    const [outcome, details] = [".outcome", "details"].map(find);
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      // A button that is disabled would lose the focus.
      if (button.ariaDisabled === "true") return;
      const body = endpoints[path].body(Object.fromEntries(new FormData(form)));
      const startTime = performance.now();
      button.ariaDisabled = "true";
      alert.hidden = true;
      status.textContent = "Waiting for the server …";
      try {
        const answer = await post(path, body);
        outcome.replaceChildren(endpoints[path].show(answer, body));
        status.textContent = `Done in ${Math.round(performance.now() - startTime)} ms.`;
        details.querySelector("pre").textContent = curl(path, body);
        outcome.hidden = details.hidden = false;
      } catch (error) {
        status.textContent = "";
        outcome.hidden = details.hidden = true;
        const message = error instanceof TypeError ? "the server does not respond." : error.message;
        alert.textContent = message.charAt(0).toUpperCase() + message.slice(1);
        alert.hidden = false;
      } finally {
        button.ariaDisabled = null;
      }
    });
  }
}
