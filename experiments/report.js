(() => {
  const form = document.getElementById("filters"), said = document.getElementById("found");
  const claims = [...document.querySelectorAll("li.claim")];
  const texts = new Map(claims.map((one) => [one, one.textContent.toLowerCase()]));
  const figures = [...document.querySelectorAll("article.figure-card")];
  const papers = [...document.querySelectorAll("section.paper")];
  const apply = () => {
    const given = new FormData(form), words = (given.get("words") || "").toLowerCase().trim();
    const verdicts = given.getAll("verdict"), marks = given.getAll("mark");
    const asked = words || verdicts.length || marks.length || given.get("paper") || given.get("by");
    let n = 0;
    for (const one of claims) {
      const of = one.dataset, shown = (!given.get("paper") || of.paper === given.get("paper"))
        && (!given.get("by") || of.by === given.get("by"))
        && (!verdicts.length || verdicts.includes(of.verdict))
        && marks.every((mark) => of.marks.split(" ").includes(mark))
        && (!words || texts.get(one).includes(words));
      one.hidden = !shown;
      n += shown;
    }
    for (const one of figures) one.hidden = asked && !one.querySelector("li.claim:not([hidden])");
    for (const one of papers) one.hidden = asked && !one.querySelector("article:not([hidden])");
    said.textContent = asked ? `${n} of ${claims.length} claims` : `All ${claims.length} claims`;
  };
  form.hidden = false;
  form.addEventListener("input", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(apply));
  apply();
  // A link to a figure that is filtered out shows it.
  addEventListener("hashchange", () => {
    const aim = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (aim && aim.closest("[hidden]")) { form.reset(); setTimeout(() => aim.scrollIntoView()); }
  });
})();
