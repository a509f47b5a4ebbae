// Keeps the parts of a page that change up to date: when the server has new figures, the page is fetched
// again and those parts are replaced. What the reader is just using stays as it is.
"use strict";
(function () {
  if (!window.EventSource || !document.querySelector("[data-live]")) return;
  let busy = false, pressed = false;
  // What is just being clicked stays, or the click would be lost.
  addEventListener("pointerdown", () => { pressed = true; });
  for (const end of ["pointerup", "pointercancel"]) addEventListener(end, () => { pressed = false; });
  async function refresh() {
    if (busy || document.hidden) return;
    busy = true;
    try {
      const reply = await fetch(location.href, { credentials: "same-origin", headers: { Accept: "text/html" } });
      if (!reply.ok) return;
      const fresh = new DOMParser().parseFromString(await reply.text(), "text/html");
      for (const part of document.querySelectorAll("[data-live][id]")) {
        if (pressed) return;
        const other = fresh.getElementById(part.id);
        if (!other || part.innerHTML === other.innerHTML) continue;
        const used = document.activeElement;
        if (used && part !== used && part.contains(used)) {
          // The one that has the focus is found again by what it does.
          const mark = used.getAttribute("href") || used.textContent;
          part.replaceChildren(...other.childNodes);
          for (const each of part.querySelectorAll("a, button"))
            if ((each.getAttribute("href") || each.textContent) === mark) { each.focus(); break; }
        } else part.replaceChildren(...other.childNodes);
      }
    } catch (error) {
      // The server is away; the stream connects again by itself.
    } finally { busy = false; }
  }
  new EventSource("/events").onmessage = refresh;
  document.addEventListener("visibilitychange", refresh);
})();
