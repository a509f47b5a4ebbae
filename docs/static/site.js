/* What the site does in the browser.

   A button on each block of code that copies it: commands without their prompt, and without what they print. */
"use strict";

/* The search shows excerpts of the pages that it fetches. From a folder nothing can be fetched: there they come
   from texts.js, which the build writes. */
if (location.protocol === "file:") {
  const folder = new URL(".", document.currentScript.src);
  const site = new URL("..", folder).href;
  let loading = null;
  const texts = () => loading ??= new Promise((resolve) => {
    const script = document.createElement("script");
    script.src = new URL("texts.js", folder);
    script.onload = () => resolve(window.treadleTexts);
    document.head.append(script);
  });
  window.fetch = async (address) => {
    const page = new URL(address, location.href).href.slice(site.length).replace(/\.html.*$/, "");
    const main = document.createElement("div");
    main.setAttribute("role", "main");
    main.textContent = (await texts())[page] ?? "";
    return new Response(main.outerHTML);
  };
}

document.addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll("div.highlight")) {
    const code = block.querySelector("pre");
    if (code === null) continue;
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = "Copy";
    button.setAttribute("aria-label", "Copy this block");
    button.addEventListener("click", async () => {
      const lines = code.textContent.replace(/\n$/, "").split("\n");
      const commands = lines.filter((line) => line.startsWith("$ "));
      const text = commands.length ? commands.map((line) => line.slice(2)).join("\n") : lines.join("\n");
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
    block.append(button);
  }
});
