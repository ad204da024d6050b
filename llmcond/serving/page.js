"use strict";
// Everything that is shown is set as text, never as HTML.
{
  const element = (name, properties = {}, ...children) => {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
  };
  const lines = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);
  const values = (text) => text.split(",").map((value) => value.trim()).filter(Boolean);
  const valued = (condition, text) => (values(text).length ? { condition, values: values(text) } : { condition });
  const figure = (value) => (value === null ? "–" : value.toFixed(3));

  const table = (caption, heads, rows) => {
    const head = heads.map(([text, kind]) => element("th", { scope: "col", className: kind }, text));
    const body = rows.map((cells) =>
      element("tr", {}, ...cells.map((cell, i) => element("td", { className: heads[i][1] }, cell))));
    const made = element("table", {},
      element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body));
    // What scrolls sideways is reached by keyboard, too.
    return element("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: caption }, made);
  };

  const cosine = (a, b) => {
    const dot = (x, y) => x.reduce((sum, value, i) => sum + value * y[i], 0);
    return dot(a, b) / (Math.sqrt(dot(a, a) * dot(b, b)) || 1);
  };

  // By endpoint: the body that is sent for what a form holds, and how an answer is shown.
  const endpoints = {
    "/v1/similarity": {
      body: (form) => {
        const examples = form.values.split("\n");
        const rows = form.conditions.split("\n").map((text, i) => [text.trim(), values(examples[i] ?? "")])
          .filter(([condition]) => condition);
        return {
          sentence1: form.sentence1, sentence2: form.sentence2, condition: rows.map(([condition]) => condition),
          ...(rows.some(([, own]) => own.length) ? { values: rows.map(([, own]) => own) } : {}),
        };
      },
      show: (answer, { condition }) =>
        table("Similarity under each condition", [["Condition", "text"], ["Similarity", "number"], ["", ""]],
          answer.similarities.map((value, i) => [condition[i], figure(value), element("meter", {
            min: 0, max: 1, value: value ?? 0, ariaLabel: `Similarity under ${condition[i]}`,
          })])),
    },
    "/v1/embeddings": {
      body: (form) => ({ input: lines(form.texts), ...valued(form.condition, form.values), encoding_format: "float" }),
      show: (answer, { input }) => {
        const vectors = answer.data.map((one) => one.embedding);
        const heads = [["Text", "text"], ...input.map((_, i) => [`${i + 1}`, "number"]), ["Begins with", "number"]];
        return table("Cosines of the texts", heads, vectors.map((own, i) => [
          `${i + 1}. ${input[i]}`, ...vectors.map((other) => figure(cosine(own, other))),
          own.slice(0, 3).map(figure).join(" "),
        ]));
      },
    },
    "/v1/search": {
      body: (form) => ({
        query: form.query, ...valued(form.condition, form.values), k: Number(form.k),
        ...(form.where.trim() ? { where: form.where } : {}),
      }),
      show: (answer) => element("ol", {}, ...answer.results.map(({ rank, score, text, ...others }) =>
        element("li", {},
          element("span", { className: "muted" }, `${rank}. `, figure(score)), " ",
          element("span", { className: "text" }, text),
          element("span", { className: "detail" },
            Object.entries(others).filter(([, value]) => typeof value !== "object")
              .map(([name, value]) => `${name}: ${value}`).join(", "))))),
    },
  };

  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const curl = (path, body) => {
    const key = document.getElementById("key") ? ` \\\n  -H "Authorization: Bearer $KEY"` : "";
    return `curl ${location.origin}${path} -H 'Content-Type: application/json'${key} \\\n  -d ${quoted(JSON.stringify(body))}`;
  };

  const ask = async (path, body) => {
    const key = document.getElementById("key")?.value.trim();
    const response = await fetch(path, {
      method: "POST",
      headers: { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) },
      body: JSON.stringify(body),
    });
    const answer = await response.json();
    if (!response.ok) throw new Error(answer.error.message);
    return answer;
  };

  // The key's form is sent nowhere: it lets browsers see where a password belongs.
  document.querySelector("form.key")?.addEventListener("submit", (event) => event.preventDefault());

  for (const form of document.querySelectorAll("form[data-path]")) {
    const { path } = form.dataset;
    const find = (selector) => form.parentElement.querySelector(selector);
    const [button, status, alert] = ["button", "[role=status]", "[role=alert]"].map(find);
    const [outcome, details] = [".outcome", "details"].map(find);
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      const body = endpoints[path].body(Object.fromEntries(new FormData(form)));
      const began = performance.now();
      button.disabled = true;
      alert.hidden = true;
      status.textContent = "…";
      try {
        const answer = await ask(path, body);
        outcome.replaceChildren(endpoints[path].show(answer, body));
        status.textContent = `${Math.round(performance.now() - began)} ms`;
        details.querySelector("pre").textContent = curl(path, body);
        outcome.hidden = details.hidden = false;
      } catch (error) {
        status.textContent = "";
        outcome.hidden = details.hidden = true;
        alert.textContent = error instanceof TypeError ? "The server does not answer." : error.message;
        alert.hidden = false;
      } finally {
        button.disabled = false;
      }
    });
  }
}
